"""Makes the directory of a run and records in it what will be run, before anything starts."""

import json
import shutil
import time
from contextlib import ExitStack
from pathlib import Path

import chaosrun
from chaosrun.checkpoint.object_storage import ObjectStorage
from chaosrun.errors import UsageError, of_the_machine
from chaosrun.faults.fault import FaultPlan
from chaosrun.records.folders import new_folder
from chaosrun.records.journal import write_durably
from chaosrun.records.layout import LEGS, RUN, RunLayout
from chaosrun.records.object_urls import ObjectPlace, is_url
from chaosrun.records.run_file import Early, Kind, Reference, RunInfo, claim, write_run
from chaosrun.spec.job_file import Job
from chaosrun.spec.model import JobSpec
from chaosrun.supervise.objects import claim_objects


def create_run(
    root: Path,
    job: Job,
    *,
    plan: FaultPlan,
    overrides: list[str],
    reference: str,
    early: Early = "never",
    kind: Kind = "drill",
    metrics: str | None = None,
    address: str | None = None,
) -> RunLayout:
    """Make a new run directory below `root`. Raises UsageError and ResourcesError for a place that cannot be recorded or a
    directory that cannot be made there, OSError for a file in it that cannot be written."""
    spec = job.spec
    for what, place in (("root", root.absolute()), ("job's directory", job.directory)):
        name = str(place)
        if name != name.encode(errors="replace").decode():
            raise UsageError(f"the {what} {name!r} cannot be recorded: it is not UTF-8", hint="use a folder whose path is")
    run = RunLayout(new_folder(root / "runs", spec.name))
    with ExitStack() as undo:
        undo.callback(shutil.rmtree, run.path, ignore_errors=True)  # without its run.json nothing would find it again
        storage, nonce = _storage(spec, job.directory, run, undo)
        write_durably(run.job_yaml, job.text.encode())
        write_durably(run.plan_json, json.dumps(plan.to_json(), indent=1).encode())
        write_run(
            run,
            RunInfo(
                run_id=run.run_id,
                created_s=time.time(),
                chaosrun=chaosrun.__version__,
                # The command line can be submitted again from the run's own copy.
                job=str(run.job_yaml.absolute() if job.typed else job.path.resolve()),
                typed=tuple(job.typed.words) if job.typed else None,
                directory=str(job.directory),
                script=str(job.script_path),
                overrides=tuple(overrides),
                spec=spec.model_dump(mode="json"),
                reference=Reference(mode=reference),
                storage={leg: f"{storage}/{leg}" if storage else None for leg in LEGS},
                storage_nonce=nonce,
                irreproducible=None,
                masked=job.masked,
                early=early,
                kind=kind,
                metrics=metrics,
                address=address,
            ),
        )
        undo.pop_all()
    if kind == "run":
        run.leg(RUN).path.mkdir()
    return run


def try_storage(spec: JobSpec) -> None:
    """Check that checkpoints can be committed to the job's object store, if it has one; leaves nothing there.

    Raises UsageError and ResourcesError, with a hint, when they cannot.
    """
    if spec.checkpoint.storage is not None and is_url(spec.checkpoint.storage):
        ObjectStorage(ObjectPlace(spec.checkpoint.storage.rstrip("/"), tuple(spec.env.items()))).try_out()


def _storage(spec: JobSpec, directory: Path, run: RunLayout, undo: ExitStack) -> tuple[str | None, str | None]:
    """Where this run's checkpoints go, and the nonce that marks it; None for the run directory. Raises UsageError and
    ResourcesError when it cannot be written. `undo`: takes the removal of a directory made."""
    if spec.checkpoint.storage is None:
        return None, None
    if is_url(spec.checkpoint.storage):
        try_storage(spec)
        url = f"{spec.checkpoint.storage.rstrip('/')}/{run.run_id}"
        return url, claim_objects(ObjectPlace(url, tuple(spec.env.items())), run)
    storage = directory / spec.checkpoint.storage / run.run_id
    try:
        storage.mkdir(parents=True)
        undo.callback(shutil.rmtree, storage, ignore_errors=True)
        nonce = claim(storage, run)
    except OSError as error:
        raise of_the_machine(error) or UsageError(
            f"checkpoint.storage {directory / spec.checkpoint.storage} cannot be written: {error.strerror}",
            hint="name a directory that exists or can be made, on storage that all nodes share",
        ) from error
    return str(storage.resolve()), nonce
