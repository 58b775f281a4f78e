#!/bin/bash
# Scripts of this folder, one after the other, within a time. usage: OUT=DIR series.sh SECONDS < LIST
#
# A line of LIST is "LIMIT COMMAND…": the command gets LIMIT seconds ($LIMIT_S, and "LIMIT_S" among its words), or what is left of SECONDS where that is
# less; with under 30 it is left out. Lines that begin with "&" run beside each other on GPU 0, each in a lane of its own, and time nothing.
# What each says goes to $OUT/NAME.log. Shown are the checks that failed, the last line, and when it ended.
set -u
here=$(dirname "$0")
total=$1
: "${OUT:?a directory for what they find}"
export OUT

one() {
    local limit=$1 name log
    shift
    name=$(basename "$(printf '%s\n' "$@" | grep -m 1 '\.py$')" .py)
    log=$OUT/$name${TURN:+-$TURN}.log
    LIMIT_S=$limit timeout -k 5 $((limit + 10)) "${@//LIMIT_S/$limit}" > "$log" 2>&1 < /dev/null
    local code=$?
    grep '^FAIL' "$log" | cut -c1-600
    echo "[$SECONDS s] $name: exit $code, $(tail -1 "$log" | cut -c1-300)"
}

while read -r limit line; do
    beside=
    if [ "$limit" = "&" ]; then beside=1 && read -r limit line <<< "$line"; else wait; fi
    left=$((total - SECONDS - 12))
    [ "$limit" -lt "$left" ] || limit=$left
    if [ "$limit" -lt 30 ]; then echo "[$SECONDS s] left out: $line" && continue; fi
    read -ra words <<< "$line"
    TURN=$((${TURN:-0} + 1))
    if [ "$beside" ]; then LAB_SHARED=1 one "$limit" bash "$here/lane.sh" 0 "${words[@]}" & else one "$limit" "${words[@]}"; fi
done
wait
