#!/usr/bin/env bash
# Requests made from the served OpenAPI document, good ones and broken ones. The same in every run.
set -euo pipefail
cd "$(dirname "$0")"
exec schemathesis --config-file schemathesis.toml run "$CLARY_URL/openapi.json" \
    --max-examples 15 --generation-deterministic \
    --phases examples,coverage,fuzzing --max-time 120 --request-timeout 30 --workers 2 --no-color \
    --suppress-health-check all --warnings off
