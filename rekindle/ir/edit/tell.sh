name=$1 uri=$2 file=$3; shift 3
"$@" || exit
report=$(printf %s "$0" | sed -n 's/.*"outputFile" *: *"\([^"]*\)" *} *} *$/\1/p')
mkdir -p "$(dirname "$file")"
{
  printf '{"name": "%s", "uri": "%s", "told": ' "$name" "$uri"
  if [ -s "$report" ]; then cat "$report"; else printf '{}'; fi
  printf '}'
} > "$file"
