#!/bin/sh
# Runs one process for an agent and enforces its end on the device itself, without agent, connection or correct clock.
#
#   sh supervise.sh run ROOT RUN FENCE EPOCH SECONDS STDOUT_MAX STDERR_TAIL MASK CORES PROGRAM COMMAND...
#   sh supervise.sh claim ROOT RUN FENCE EPOCH
#
# `claim` records an epoch, ends what an older one left running, and prints the outcome.
# `run` reads standard input, which the agent keeps open: a line, or its end, means "kill". It writes a line of
# RUN, the runner's output, at most STDOUT_MAX bytes, then a line that starts with RUN and reports the end, then the last
# STDERR_TAIL bytes of the runner's errors.
#
# The runner and all it starts inherit ROOT/lock, locked, as descriptor 9: nobody else runs while one of them lives, and
# whatever has to be killed is found by it even after leaving the process group. A second process group, without the
# lock, kills at the deadline or when standard input ends, whatever happens to this shell. It also kills when one of the
# two shells of the first group is gone: each holds a lock of its own (ROOT/runs/RUN/alive and kept) that it waits for,
# which costs nothing while nothing happens. FENCE is "-" or the authority that counts epochs; ROOT/fences/FENCE holds the
# highest EPOCH that ran here, and an older one is refused.
#
# Plain sh, and of the tools only what dash, mksh, busybox and toybox agree on: mksh closes on exec what
# `exec 9>file` opened, toybox's flock takes descriptors only, dash gives background jobs /dev/null as input.

uptime_s() { read -r up rest </proc/uptime; echo "$up"; }

# Kills run $1: its process group, and whoever holds the lock while it is that run's.
kill_run() {
    [ -s "$root/runs/$1/pid" ] && kill -9 "-$(cat "$root/runs/$1/pid")"
    kill_holders "$1"
}

kill_holders() {
    read -r owner _ _ <"$root/holder"
    [ "$owner" = "$1" ] || return 0
    for pid in $(holders); do kill -9 "$pid"; done
}

# Process ids that have the lock as descriptor 9.
holders() {
    ls -l /proc/[0-9]*/fd/9 | grep -F " -> $root/lock" | sed 's|.* /proc/\([0-9]*\)/fd/9 -> .*|\1|'
}

# The second process group, which ends itself too.
watch() {
    { sleep "$1"; finish late; } </dev/null &
    { flock 6 && finish lost; } 6>"$here/alive" </dev/null &
    { flock 6 && finish lost; } 6>"$here/kept" </dev/null &
    read -r _
    finish lost
}

# A runner that is only just starting may be neither a group nor a holder of the lock yet, so once is not enough.
finish() {
    : >"$here/$1"
    for pause in 0 0.1 1; do
        sleep $pause
        kill_run "$run"
    done
    kill -9 0
}

# Refuses an epoch older than the last that ran here, otherwise records this one.
admit() (
    flock 8
    last=$(cat "$root/fences/$fence")
    if [ "$epoch" -lt "${last:-0}" ]; then
        echo "stale $last" >"$here/end"
        exit 1
    fi
    [ "$epoch" = "$last" ] || { echo "$epoch" >"$here/epoch" && mv -f "$here/epoch" "$root/fences/$fence"; }
) 8>"$root/fences/.lock"

# Kills what an older lease of the same authority left running.
evict() {
    read -r owner whose _ <"$root/holder"
    [ "$fence" != - ] && [ "$whose" = "$fence" ] && kill_run "$owner"
}

take_lock() {
    tries=0
    until flock -n 7; do
        if [ $tries -ge 20 ]; then
            echo "busy $(holders | head -n 1)" >"$here/end"
            return 1
        fi
        evict
        tries=$((tries + 1))
        sleep 0.1
    done
}

# Descriptor 3 is the agent, 5 takes the runner's errors, 6 says that this shell lives, 7 is the lock while it is waited
# for: as 9 it would be killed.
keep() {
    flock 6
    [ "$fence" = - ] || admit || return
    take_lock || return
    # Somebody newer may have come while this one waited.
    [ "$fence" = - ] || admit || return
    echo "$run $fence $epoch" >"$here/holder" && mv -f "$here/holder" "$root/holder" || return
    for old in "$root"/runs/*; do
        [ "$old" = "$here" ] || [ ! -e "$old/pid" ] || rm -rf "$old"
    done
    setsid sh "$0" watch "$root" "$run" "$fence" "$epoch" "$seconds" <&3 >/dev/null 2>&1 3<&- 4>&- 5>&- 6>&- 7>&- &
    watcher=$!
    from=$(uptime_s)
    setsid "$@" </dev/null 2>&5 9>&7 3<&- 4>&- 5>&- 6>&- 7>&- &
    runner=$!
    echo $runner >"$here/pid"
    [ -e "$here/lost" ] && { kill -9 $runner; kill_run "$run"; }
    exec 7>&-
    wait $runner
    code=$?
    to=$(uptime_s)
    times >"$here/times"
    late=0
    [ -e "$here/late" ] && late=1
    # The group may be another's by now: its first process is gone.
    kill_holders "$run"
    # It may not be a group yet; left alone it would keep the agent's terminal open, and the agent waiting.
    kill -9 -$watcher || kill -9 $watcher
    [ "$fence" = - ] || admit || return
    echo "ran $code $from $to $late" >"$here/end"
}

allowed_cores() { "$@" sed -n 's/^Cpus_allowed_list:.//p' /proc/self/status; }

# Whether exactly the wanted cores can be had: of those that a cpuset forbids, the kernel says nothing.
has_cores() { [ "$(allowed_cores taskset "$mask" 2>/dev/null)" = "$cores" ]; }

run() {
    seconds=$1 limit=$2 tail=$3 mask=$4 cores=$5 program=$6
    shift 6
    trap : HUP PIPE
    # Output of a login shell ends here.
    echo "$run"
    if ! command -v "$program" >/dev/null; then
        echo "missing" >"$here/end"
    elif [ "$mask" != - ] && ! has_cores; then
        echo "processors $(allowed_cores)" >"$here/end"
    else
        # `exec` closes for good: a shell keeps a copy of what it closes for one command only.
        { flock 6; {
            { exec 6>&-; { keep "$@" 6>"$here/kept" 7>"$root/lock"; } 5>&1 >&4 2>/dev/null |
                tail -c "$tail" >"$here/errors"; } 4>&1 | head -c "$limit" 6>&-; } 3<&0; } 6>"$here/alive"
    fi
    times >"$here/all"
    [ -e "$here/errors" ] || : >"$here/errors"
    [ -e "$here/times" ] || cat "$here/all" >"$here/times"
    printf '\n%s %s %s %s %s\n' "$run" "$(wc -c <"$here/errors")" "$(echo $(cat "$here/times"))" \
        "$(echo $(cat "$here/all"))" "$(cat "$here/end" 2>/dev/null || echo broken)"
    cat "$here/errors"
    rm -rf "$here"
}

claim() {
    { admit && take_lock && echo claimed >"$here/end"; } 7>"$root/lock" 2>/dev/null
    cat "$here/end"
    rm -rf "$here"
}

mode=$1 root=$2 run=$3 fence=$4 epoch=$5 here=$2/runs/$3
shift 5
umask 077
[ "$mode" = watch ] || mkdir "$here" || exit 1
"$mode" "$@"
