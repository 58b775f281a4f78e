#!/bin/bash
# usage: one NAME SECONDS COMMAND…
export PYTHONUNBUFFERED=1
one() { local name=$1 s=$2; shift 2; local t=$SECONDS; timeout -k 5 $s "$@" > $OUT/$name.log 2>&1 < /dev/null; echo "## $name rc $? $((SECONDS-t)) s"; pkill -9 -f 'target.py|rank.py|plain_target' ; sleep 1; tail -n ${TAIL:-6} $OUT/$name.log | cut -c1-1200; }
