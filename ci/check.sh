#!/usr/bin/env bash
# Are recipes well-formed, and are their locks what would be built? Compiles nothing.
set -euo pipefail
sm120kit recipe check
sm120kit recipe lock --check
