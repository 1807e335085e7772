#!/bin/sh
# A runner with a known answer: the SHA-256 of its model. Or it misbehaves as its arguments say.
#
#   runner --model FILE --seconds S --conduct WORD --tag JOB --limit SECONDS
#
# TAG and LIMIT are for those who watch the device's processes: whose run this is, and when it must be gone.
while [ $# -gt 1 ]; do
    case $1 in
        --model) model=$2 ;;
        --seconds) seconds=$2 ;;
        --conduct) conduct=$2 ;;
    esac
    shift 2
done
answer=$(sha256sum <"$model" | cut -c1-64)
sleep "$seconds"
case $conduct in
    crash) kill -SEGV $$ ;;
    hang) sleep 3600 ;;
    garbage) echo "no report" && exit ;;
    flood) while :; do echo "$answer$answer$answer$answer"; done ;;
    out_of_memory) echo '{"v": 1, "error": {"kind": "out_of_memory", "message": "pretended"}}' && exit 71 ;;
esac
echo '{"v": 1, "load_ms": 1, "ttft_ms": 1, "decode_ns": [1000], "finite": true, "info": {"answer": "'"$answer"'"}}'
