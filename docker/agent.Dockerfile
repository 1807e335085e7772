# The agent: serves the devices of its host to a coordinator. No torch, no Ray, no database.
# docker build -f docker/agent.Dockerfile -t hilnas-agent .

FROM python:3.11-slim-bookworm
# For phones on USB: the adb server owns them, and accepts the keys that were allowed on their screens.
RUN apt-get update && apt-get install -y --no-install-recommends adb \
    && rm -rf /var/lib/apt/lists/*
COPY . /src
RUN pip install --no-cache-dir -c /src/requirements.lock "/src[agent]" \
    && rm -rf /src \
    && useradd --create-home --uid 10001 --groups plugdev hilnas && install -d -o hilnas -g hilnas /data /cache
USER hilnas
ENV NAS_HOME=/data NAS_CACHE=/cache PYTHONUNBUFFERED=1
VOLUME ["/data", "/cache"]
STOPSIGNAL SIGTERM
ENTRYPOINT ["nas"]
CMD ["agent", "run", "--log-json"]
