#!/usr/bin/env bash
# Check that recipes are well-formed and lockfiles are current. Compiles nothing.
set -euo pipefail
sm120kit recipe check
sm120kit config check
sm120kit recipe lock --check
