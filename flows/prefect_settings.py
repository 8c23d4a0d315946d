"""What Trainshed configures in Prefect: client and server settings, and the names that `flows.registration` registers."""

from __future__ import annotations

POOL = "trainshed"  # the work pool
AUTOMATION = "Runs without a heartbeat have crashed"

HEARTBEAT_SECONDS = 30  # registration.py marks a run as crashed after three without one

# Environment of servers and flow runs, read when Prefect is imported.
SETTINGS = {
    # Telemetry would delay the start where there is no network, and print a notice into the live line.
    "PREFECT_SERVER_ANALYTICS_ENABLED": "false",
    "DO_NOT_TRACK": "1",
    "PREFECT_CLIENT_MAX_RETRIES": "7",  # an unreachable server is retried after 2, 4, ... 128 s
    "PREFECT_FLOWS_HEARTBEAT_FREQUENCY": str(HEARTBEAT_SECONDS),
}
