# docker build -t chaosrun .
# docker run --rm --shm-size 1g chaosrun submit jobs/bytelm/job.yaml
#
# TORCH_INDEX_URL names a package index to take torch from: PyTorch publishes one for CPU-only builds and one for each CUDA
# version (its "Get Started" page lists them). Empty, torch comes from the default index. For GPUs:
#
#   docker build --build-arg TORCH_INDEX_URL=<the index of your CUDA version> -t chaosrun:cuda .
#   docker run --rm --gpus all --shm-size 1g chaosrun:cuda submit jobs/bytelm/job.yaml

ARG PYTHON_VERSION=3.11
FROM python:${PYTHON_VERSION}-slim

ARG TORCH_INDEX_URL=""
ENV PIP_NO_CACHE_DIR=1 PIP_DISABLE_PIP_VERSION_CHECK=1 PYTHONUNBUFFERED=1

# What strikes inside a script's own save (faults of phase save) needs strace.
RUN apt-get update -qq && apt-get install -qq --no-install-recommends strace && rm -rf /var/lib/apt/lists/*

WORKDIR /opt/chaosrun
COPY pyproject.toml constraints.txt README.md LICENSE ./
# torch alone first: it is by far the largest layer, and changes least.
RUN pip install --constraint constraints.txt ${TORCH_INDEX_URL:+--index-url "$TORCH_INDEX_URL"} torch
COPY chaosrun chaosrun
# Of pyproject.toml; ray-jobs: Ray's server for jobs, which KubeRay and `ray job submit` talk to.
ARG EXTRAS="examples,ray-jobs"
RUN pip install --constraint constraints.txt ".${EXTRAS:+[$EXTRAS]}"
COPY jobs jobs

RUN useradd --create-home --uid 1000 chaosrun
USER chaosrun
# Runs are kept here: mount a volume to keep them, with the checkpoints on the same file system.
ENV CHAOSRUN_ROOT=/home/chaosrun/runs
ENTRYPOINT ["chaosrun"]
CMD ["--help"]
