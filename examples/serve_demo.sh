#!/bin/sh
# serve_demo.sh: train the demonstration's model, export it as one file, serve it, ask five questions, and go on training: the server
# follows ten increments, and knows each of them soon after it was saved. `make demo-serve` runs it.
#
#   examples/serve_demo.sh PERILUNE OUT RANKS [words of examples/dlrm.lua, such as --data synthetic:200000]
set -eu
[ $# -ge 3 ] || { echo "usage: examples/serve_demo.sh PERILUNE OUT RANKS [words of examples/dlrm.lua]" >&2; exit 2; }
perilune=$1 out=$2 ranks=$3
shift 3
here=$(dirname "$0")
command -v curl >/dev/null || { echo "perilune: demo-serve asks its questions with curl, which is not here: make setup" >&2; exit 1; }
first=200 each=20 last=400 # steps before the server, of an increment, and at the end
rm -rf "$out"
mkdir -p "$out"

train() { # steps, and how often they are saved
  "$perilune" run -n "$ranks" --checkpoint "$out/checkpoints" --every "$2steps" --full-every 1000 --keep 20 \
    "$here/dlrm.lua" --out "$out" --no-baseline --no-recommend --patience 0 --steps "$1" $words
}
words="$*"

echo "== training $first steps"
train $first $first
echo "== exporting the model"
PERI_DEMO_WORDS="--out $out $words" "$perilune" export "$(ls -d "$out"/checkpoints/save-* | tail -1)" --model "$here/dlrm/export.lua" \
  -o "$out/model.peri"
ls -l "$out/model.peri" | awk '{ printf "%s: %.1f MB\n", $NF, $5 / 1e6 }'

echo "== serving it"
"$perilune" serve "$out/model.peri" -p 0 --follow "$out/checkpoints" >"$out/server.log" 2>&1 &
server=$!
trap 'kill $server 2>/dev/null || true' EXIT
for i in $(seq 200); do
  url=$(sed -n 's|.*\(http://[^ ]*\) .*|\1|p' "$out/server.log" | head -1)
  [ -z "$url" ] || break
  kill -0 $server 2>/dev/null || { cat "$out/server.log" >&2; exit 1; }
  sleep 0.05
done
sed 1q "$out/server.log"

ask() { # the number of a question: the model's probability
  curl -s -S --fail-with-body --data-binary @"$out/question-$1.json" "${url}v1/models/demo:predict" |
    sed 's/.*\[\([^],]*\).*/\1/' | awk '{ printf "%.4f", 1 / (1 + exp(-$1)) }'
}
version() { curl -s -S "${url}health" | sed 's/.*"version":"\([^"]*\)".*/\1/'; }

echo "== five questions: samples of which the training knows nothing"
for i in 1 2 3 4 5; do
  echo "   curl --data-binary @$out/question-$i.json ${url}v1/models/demo:predict"
  echo "   the model says $(ask $i), it was $(sed -n "${i}p" "$out/answers.txt")"
done

echo "== training on to step $last; the server follows"
train $last $each >"$out/training.log" 2>&1 &
trainer=$!
seen=$first followed=0
while [ "$seen" -lt $last ]; do
  now=$(version)
  if [ "$now" != "$seen" ]; then
    seen=$now followed=$((followed + 1))
    echo "   step $seen: the model says $(for i in 1 2 3 4 5; do printf '%s ' "$(ask $i)"; done)"
  elif ! kill -0 $trainer 2>/dev/null; then
    sleep 1
    [ "$(version)" != "$seen" ] || break
  fi
  sleep 0.02
done
wait $trainer || { cat "$out/training.log" >&2; exit 1; }
[ "$(version)" = $last ] || { echo "perilune: the server has step $(version), not $last; see $out/server.log" >&2; exit 1; }

echo "== stopping"
kill $server
wait $server || { cat "$out/server.log" >&2; exit 1; }
trap - EXIT
echo "the server followed $followed states, up to step $last; see $out: model.peri, checkpoints, server.log, training.log"
