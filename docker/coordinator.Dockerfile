# The coordinator: searches, trains, stores, serves agents and people.
# docker build -f docker/coordinator.Dockerfile -t hilnas-coordinator .

FROM python:3.11-slim-bookworm
# A compiler, because runners are built here.
RUN apt-get update && apt-get install -y --no-install-recommends g++ \
    && rm -rf /var/lib/apt/lists/*
COPY . /src
# Where pip finds more than its own index has, such as PyTorch's smaller wheels for CPUs: docker build --build-arg.
ARG PIP_EXTRA_INDEX_URL=""
# Installed as it was tested: the versions of the lock file. The driver is for a PostgreSQL database.
RUN pip install --no-cache-dir -c /src/requirements.lock "/src[search,build,postgres]" \
    && rm -rf /src \
    && useradd --create-home --uid 10001 hilnas && install -d -o hilnas -g hilnas /data /cache
USER hilnas
ENV NAS_HOME=/data NAS_CACHE=/cache PYTHONUNBUFFERED=1 RAY_USAGE_STATS_ENABLED=0
VOLUME ["/data", "/cache"]
EXPOSE 7711
# Whether database and disk let it work; its certificate is for the name that agents use, not for this address.
HEALTHCHECK --interval=30s --timeout=5s --start-period=60s CMD ["python", "-c", \
    "import ssl, urllib.request as u; u.urlopen('https://127.0.0.1:7711/readyz', timeout=4, context=ssl._create_unverified_context())"]
STOPSIGNAL SIGTERM
ENTRYPOINT ["nas"]
CMD ["serve", "--host", "0.0.0.0", "--log-json"]
