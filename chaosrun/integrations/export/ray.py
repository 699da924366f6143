"""Ray's own jobs: a `ray job submit` for a cluster that runs, and a RayJob for Kubernetes that brings its cluster along."""

import re
from importlib.metadata import version

from chaosrun.integrations.export.rendering import checked, render
from chaosrun.integrations.export.subject import Subject

IMAGE = "chaosrun:latest"
"""As the Dockerfile's first line builds it."""
IN_THE_IMAGE = "/opt/chaosrun"
"""Where the Dockerfile puts the project."""
VOLUME = "/mnt/chaosrun"
SETUP_TIME_S = 30 * 60
"""What pulling images, Ray's start and both legs take beside the job's own time."""
LONGEST_NAME = 40
"""KubeRay makes names of pods and services from it, which may have 63 characters."""


def submission(subject: Subject) -> str:
    """A shell script that submits the drill to a Ray cluster with `ray job submit` and waits for it."""
    return render("ray-job.sh.j2", name=subject.name, command=subject.command(subject.inside), project=str(subject.project))


def ray_job(subject: Subject, *, image: str = IMAGE) -> str:
    """A manifest of KubeRay's ray.io/v1 RayJob: a head that supervises, and one pod for each worker.

    Fields as in KubeRay's ray.io_rayjobs.yaml (helm-chart/kuberay-operator/crds), read at commit feaeface.
    """
    return render(
        "rayjob.yaml.j2",
        name=_name(subject.name),
        # A shell reads the entrypoint, whichever way KubeRay submits it.
        command=subject.command(f"{IN_THE_IMAGE}/{subject.inside}"),
        volume=VOLUME,
        image=checked(image, "the image"),
        ray=version("ray"),
        workers=subject.workers,
        cpu=subject.cpus(1),
        gpu=subject.gpu,
        deadline_s=None if subject.timeout_s is None else int(subject.timeout_s) + SETUP_TIME_S,
    )


def _name(name: str) -> str:
    """A name as Kubernetes wants it: RFC 1123, lower case letters, digits and hyphens, a letter first."""
    plain = re.sub(r"[^a-z0-9]+", "-", name.lower()).strip("-")
    return f"chaosrun-{plain}"[:LONGEST_NAME].rstrip("-")
