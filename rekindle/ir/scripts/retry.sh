left=$1 pause=$2 factor=$3 longest=$4
shift 4
while :; do
    code=0
    "$@" || code=$?
    case $code in 0 | 130 | 143) exit "$code" ;; esac
    [ "$left" -gt 0 ] || exit "$code"
    echo "rekindle: exit code $code; another attempt in $pause s, $left left" >&2
    sleep "$pause"
    left=$((left - 1))
    pause=$((pause * factor))
    [ "$pause" -le "$longest" ] || pause=$longest
done
