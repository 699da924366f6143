"""From the bytes of a job file to a JobSpec, or to an error that shows every wrong place.

    text ── tree ──► placed values ── overrides ──► placed values ── model ──► JobSpec
                                                                   └ diagnosis ──► problems

The package exports nothing by itself, so that importing a part costs only that part: `spec.job_file.load_job`,
`spec.model.JobSpec`.
"""
