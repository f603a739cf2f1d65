#!/bin/sh
# Judge a scaler on real meshes, then hold the report to a baseline.
#
#     sh gate.sh MODULE:ATTRIBUTE [options of gradparity run]
#
# Files that are used where they exist, and the variables that name others:
#     GRADPARITY_RUN       the command that runs          gradparity run
#                          on GPUs: torchrun --standalone --nproc-per-node gpu \
#                                   -m gradparity.conformance run
#     GRADPARITY_OUT       folder of the report           parity-report
#     GRADPARITY_BASELINE  what must hold                 gradparity-baseline.jsonl
#     GRADPARITY_EXPECT    known violations               gradparity-expectations.toml
#
# Exit codes: 0 pass, 1 fail, 2 usage, 3 invalid or incomplete, 4 inconclusive.
set -eu

if [ "$#" -eq 0 ]; then
    echo "usage: gate.sh MODULE:ATTRIBUTE [options of gradparity run]" >&2
    exit 2
fi
scaler=$1
shift
run=${GRADPARITY_RUN:-gradparity run}
out=${GRADPARITY_OUT:-parity-report}
baseline=${GRADPARITY_BASELINE:-gradparity-baseline.jsonl}
expect=${GRADPARITY_EXPECT:-gradparity-expectations.toml}

# A report of an earlier run must never be gated in the place of this one's.
rm -f "$out/report.jsonl"

# Violations and a broken harness do not fail this step: the gate reads the report.
# Bad usage leaves no report: stop here.
status=0
$run --scaler "$scaler" "$@" --out "$out" --quiet || status=$?
if [ "$status" -eq 2 ]; then
    exit 2
fi

mkdir -p "$out" # a command that could not start has left none
set -- "$out/report.jsonl" --strict --json "$out/gate.json"
# A file that is named must be there; one of the usual name may be missing.
if [ -n "${GRADPARITY_BASELINE:-}" ] || [ -e "$baseline" ] || [ -L "$baseline" ]; then
    set -- "$@" --baseline "$baseline"
fi
if [ -n "${GRADPARITY_EXPECT:-}" ] || [ -e "$expect" ] || [ -L "$expect" ]; then
    set -- "$@" --expect "$expect"
fi
exec gradparity gate "$@"
