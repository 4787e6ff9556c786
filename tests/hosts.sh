#!/bin/bash
# mpirun across several emulated hosts on one Linux machine.
#
#   tests/hosts.sh 2,2 mpirun python script.py             two hosts of two ranks each
#   tests/hosts.sh 1,1,1,1 -r 200mbit mpirun python ...    four hosts, links of 200 Mbit/s
#   tests/hosts.sh 2,2 -s 1m mpirun python ...             with a /dev/shm of 1 MiB each
#   tests/hosts.sh --check                                 says what this machine lacks, if anything
#
# A host is a network, UTS, IPC and mount namespace: its own address, hostname, /dev/shm and
# TMPDIR (below the caller's). One bridge in a namespace of its own connects them, so they reach
# nothing outside, and several such jobs do not see one another. tc tbf limits the rate of every
# link in both directions. The processes that hold the namespaces read a pipe that closes when this
# script ends, however it ends. A guard on the same pipe then kills all other processes in them.
#
# Needs root, iproute2 and util-linux.
set -u
fail() { echo "hosts: $*" >&2; exit 3; }

check() {
  local tool
  for tool in ip tc nsenter unshare mount; do
    command -v $tool > /dev/null || fail "there is no program '$tool' (iproute2, util-linux)"
  done
  [ "$(id -u)" = 0 ] || fail "network namespaces need root"
  unshare --net --uts --ipc --mount true 2> /dev/null || fail "namespaces are not permitted here"
  unshare --net sh -c 'ip link add left type veth peer name right && ip link add bridge type bridge &&
    tc qdisc add dev left root tbf rate 1gbit burst 128kb latency 30ms' 2> /dev/null ||
    fail "the kernel lacks veth, bridge or tbf"
}

# What mpirun starts instead of ssh: agent HOLDERS TMP HOST COMMAND...
if [ "${1:-}" = agent ]; then
  read -ra holders <<< "$2"; tmp=$3; shift 3
  while [ "${1#-}" != "$1" ]; do shift; done
  k=${1#host}; shift
  exec nsenter -t "${holders[$k]}" --net --uts --ipc --mount env -i -C / HOME="$HOME" USER=root \
    PATH="$PATH" TMPDIR="$tmp/host$k" bash -c "$*"
fi

[ "${1:-}" = --check ] && { check; exit 0; }
[ $# -ge 2 ] || fail "usage: hosts.sh RANKS,RANKS,... [-r RATE] [-s SIZE] mpirun ARGUMENTS..."
IFS=, read -ra ranks <<< "$1"; shift
rate=off
shm=50%
while [ "${1#-}" != "$1" ]; do
  case $1 in
    -r) rate=$2 ;;
    -s) shm=$2 ;;
    *) fail "unknown option '$1'" ;;
  esac
  shift 2
done
check

tmp=$(mktemp -d)  # below TMPDIR
mkfifo "$tmp/life"
exec {life}<> "$tmp/life"  # both ends, so that the holders below can open theirs
holders=()
trap 'exit 143' TERM INT HUP

# hold K: a process that keeps the namespaces of host K; reads the pipe until its last writer ends.
hold() {
  unshare --net --uts --ipc --mount bash -c '
    hostname "$1"; ip link set lo up
    mount -t tmpfs -o size="$3" tmpfs /dev/shm && mount --bind "$2/hosts" /etc/hosts && : > "$2/$1.up"
    exec cat > /dev/null' hold "host$1" "$tmp" "$shm" < "$tmp/life" {life}>&- 2> "$tmp/host$1.log" &
  holders[$1]=$!
}
count=${#ranks[@]}
echo "127.0.0.1 localhost" > "$tmp/hosts"
for ((k = 0; k < count; k++)); do
  mkdir "$tmp/host$k"
  echo "10.77.0.$((k + 1)) host$k" >> "$tmp/hosts"
  echo "host$k slots=${ranks[$k]}" >> "$tmp/hostfile"
done
for ((k = 0; k <= count; k++)); do hold $k; done  # the last one is the switch
for ((k = 0; k <= count; k++)); do
  for ((i = 0; i < 500; i++)); do [ -e "$tmp/host$k.up" ] && break; sleep 0.02; done
  [ -e "$tmp/host$k.up" ] || fail "host $k does not come up: $(cat "$tmp/host$k.log")"
done

spaces=" "
for k in "${holders[@]}"; do spaces+="$(readlink "/proc/$k/ns/net") "; done
# Kills the processes that are left in the namespaces when this script has ended. It has a session
# of its own, so that a signal to the script's session does not end it.
setsid bash -c '
  cat > /dev/null
  for process in /proc/[0-9]*; do
    [[ $1 = *" $(readlink "$process/ns/net") "* ]] && kill -9 "${process#/proc/}"
  done 2> /dev/null
  rm -rf "$2"' guard "$spaces" "$tmp" < "$tmp/life" > /dev/null 2>&1 {life}>&- &
guard=$!
trap 'exec {life}>&-; wait $guard' EXIT

on() { local k=$1; shift; nsenter -t "${holders[$k]}" --net -- "$@"; }
on $count ip link add bridge type bridge
on $count ip link set bridge up
for ((k = 0; k < count; k++)); do
  on $count ip link add "port$k" type veth peer name eth0 netns "${holders[$k]}" || fail "veth"
  on $count ip link set "port$k" master bridge up
  on $k ip addr add "10.77.0.$((k + 1))/24" dev eth0
  on $k ip link set eth0 up
  [ "$rate" = off ] && continue
  shape=(root tbf rate "$rate" burst 128kb latency 30ms)
  on $k tc qdisc add dev eth0 "${shape[@]}" || fail "tc does not know the rate '$rate'"
  on $count tc qdisc add dev "port$k" "${shape[@]}"
done

printf '#!/bin/bash\nexec %q agent %q %q "$@"\n' "$(readlink -f "$0")" "${holders[*]}" "$tmp" > "$tmp/agent"
chmod +x "$tmp/agent"
export PRTE_MCA_plm_ssh_agent="$tmp/agent" PRTE_MCA_plm_ssh_no_tree_spawn=1
# Fills one host before the next; ":oversubscribe" alone puts all ranks on the first.
: "${PRTE_MCA_rmaps_default_mapping_policy:=slot:oversubscribe}"
export PRTE_MCA_rmaps_default_mapping_policy PRTE_MCA_hwloc_default_binding_policy=none
# The hosts share the cores, which Open MPI cannot know: it must always yield.
export OMPI_MCA_mpi_yield_when_idle=1
export OMPI_ALLOW_RUN_AS_ROOT=1 OMPI_ALLOW_RUN_AS_ROOT_CONFIRM=1
launcher=$(command -v "$1") || fail "there is no '$1' in PATH"
shift
total=0
for k in "${ranks[@]}"; do total=$((total + k)); done
nsenter -t "${holders[0]}" --net --uts --ipc --mount env -C "$PWD" TMPDIR="$tmp/host0" \
  "$launcher" --hostfile "$tmp/hostfile" -np $total "$@" {life}>&- &
wait $!
