# The capture proxy alone: `docker build -t benchflow-sidecar .`; needs no BuildKit.
# With a package index or a certificate authority of your own: --build-arg PIP_INDEX_URL=…, and a base image that trusts
# it with --build-arg PYTHON_IMAGE=….
ARG PYTHON_IMAGE=python:3.12-slim

FROM ${PYTHON_IMAGE} AS build
ARG PIP_INDEX_URL
WORKDIR /src
RUN python3 -m venv /venv
# The dependencies are a layer of their own, so that it stays cached when the code changes.
COPY pyproject.toml ./
RUN python3 -c "import tomllib; print(*tomllib.load(open('pyproject.toml', 'rb'))['project']['dependencies'], sep='\n')" \
      > requirements.txt \
 && /venv/bin/pip install --no-cache-dir --disable-pip-version-check -q -r requirements.txt
COPY . .
RUN /venv/bin/pip install --no-cache-dir --disable-pip-version-check -q --no-deps .

FROM ${PYTHON_IMAGE}
COPY --from=build /venv /venv
RUN mkdir /captures && chown 1000:1000 /captures
ENV PATH=/venv/bin:$PATH PYTHONUNBUFFERED=1 PYTHONDONTWRITEBYTECODE=1 HOME=/tmp \
    CAPTURE_HOST=0.0.0.0 CAPTURE_PORT=8100 CAPTURE_OUT=/captures
USER 1000:1000
WORKDIR /tmp
EXPOSE 8100
# Beyond loopback the proxy requires a key: set CAPTURE_KEY, and CAPTURE_UPSTREAM for the engine.
HEALTHCHECK --interval=5s --timeout=5s --retries=6 --start-period=30s \
  CMD ["python", "-c", "import urllib.request as r; r.urlopen('http://127.0.0.1:8100/health', timeout=4)"]
ENTRYPOINT ["python", "-m", "proxy"]
