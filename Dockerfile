# Isogloss and what requirements.txt pins, on the CUDA that its torch is built for.
#   docker build -t isogloss .
#   docker run --gpus all --ipc host --rm -v "$PWD:/work" isogloss isogloss-distill --student S ...
# Models and data of the hub stay with -v "$HOME/.cache/huggingface:/home/ubuntu/.cache/huggingface".
FROM nvidia/cuda:13.0.2-devel-ubuntu24.04

# a compiler and Python's headers for torch.compile and DeepSpeed's kernels; bwrap for tasks that
# run code, where Docker lets a container make namespaces
RUN apt-get update \
    && DEBIAN_FRONTEND=noninteractive apt-get install --yes --no-install-recommends \
        build-essential python3-dev python3-venv bubblewrap \
    && rm -rf /var/lib/apt/lists/*

RUN python3 -m venv /opt/isogloss
ENV PATH=/opt/isogloss/bin:$PATH
COPY requirements.txt /tmp/
RUN pip install --no-cache-dir -r /tmp/requirements.txt
COPY . /tmp/isogloss
RUN pip install --no-cache-dir --no-deps /tmp/isogloss && install -d -o ubuntu -g ubuntu /work

USER ubuntu
WORKDIR /work
CMD ["isogloss", "doctor"]
