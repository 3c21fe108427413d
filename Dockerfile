# docker build -t ciflows .
# docker run --rm -v "$PWD:/work" ciflows fit people.csv
# A GPU: build with --build-arg TORCH_INDEX=https://download.pytorch.org/whl/cu130, run with --gpus all.
FROM python:3.13-slim
ARG TORCH_INDEX=https://download.pytorch.org/whl/cpu
# A C compiler: networks on a CPU run in C, compiled on first use.
RUN apt-get update && apt-get install -y --no-install-recommends gcc libc6-dev && rm -rf /var/lib/apt/lists/*
RUN pip install --no-cache-dir torch --index-url "$TORCH_INDEX"
COPY pyproject.toml README.md LICENSE /src/
COPY src /src/src
RUN pip install --no-cache-dir "/src[all]"
WORKDIR /work
ENTRYPOINT ["ciflows"]
