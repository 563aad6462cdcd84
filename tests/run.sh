#!/usr/bin/env bash
# Checks and tests everything, with a RabbitMQ that is already there or one of its own.
#
# Usage: tests/run.sh [--soak]
#
#   --soak   the full counts (200,000 messages, 5,000 keys, concurrency 16) instead of those that
#            stay under 35 minutes on two cores; sets LANEWAY_SOAK=1 for the tests
#
# Environment:
#   LANEWAY_AMQP_URL         the broker to use if it answers
#                            (default amqp://guest:guest@127.0.0.1:5672)
#   LANEWAY_RABBITMQ_IMAGE   the image for a container engine (default rabbitmq:4)
#   LANEWAY_POSTGRES_URL     the PostgreSQL to use if something answers there
#                            (default postgres://postgres@127.0.0.1:5432/test)
#
# If no broker answers, a private one is started: from the program rabbitmq-server, which is
# installed first where that is possible (Debian, as root), else in a container (docker, podman).
# Tests that kill or restart a broker start one themselves and need the program rabbitmq-server.
# If no PostgreSQL answers, a private one is started from the server's programs, which are installed
# first where that is possible.
# Nothing is skipped: what is missing is named, and the exit status is not zero. Every step runs
# even if an earlier one failed, so that one run shows all there is to repair.
set -euo pipefail

cd -- "$(dirname -- "${BASH_SOURCE[0]}")/.."
exec </dev/null

say() { printf 'run.sh: %s\n' "$*"; }
die() {
    printf 'run.sh: %s\n' "$*" >&2
    exit 1
}

counts='--messages 20000 --keys 500 --concurrency 16'
orders='--orders 1000 --temporary --json'
instances='--messages 6000 --keys 200 --seconds 10 --json'
while (($# > 0)); do
    case $1 in
    --soak)
        counts='--messages 200000 --keys 5000 --concurrency 16'
        instances='--messages 60000 --keys 1000 --json'
        orders='--orders 20000 --temporary --json'
        export LANEWAY_SOAK=1
        ;;
    -h | --help)
        sed -n '2,/^set /{/^set /!s/^# \{0,1\}//p}' tests/run.sh
        exit 0
        ;;
    *) die "unknown argument: $1 (see --help)" ;;
    esac
    shift
done

# ---- The examples ---------------------------------------------------------------------------
# One line each: the name and its arguments. They check themselves, and exit non-zero if what they
# show is not so. "$counts", "$instances" and "$orders" are the sizes of this run; the words @amqp and
# @postgres stand for the URLs of the broker and the database, which are never printed. A file in
# examples/ that stands in no line is a failed step.
examples=(
    "actix_embedding"
    "modular_monolith $orders"
    "modular_monolith $orders --postgres @postgres"
    "modular_monolith $orders --postgres @postgres --nodes 2"
    "ordered_orders $counts --poison 20 --json"
    "ordered_orders $counts --poison 20 --json --amqp @amqp --queue-type classic"
    "ordered_orders $counts --poison 20 --json --amqp @amqp --queue-type quorum"
    "poison_orders --json"
    "poison_orders --json --poison-mode block"
    "poison_orders --json --amqp @amqp --queue-type classic"
    "poison_orders --json --amqp @amqp --queue-type quorum --poison-mode block"
    "sharded_instances $instances --chaos roll --amqp @amqp"
    "sharded_instances $instances --chaos kill --queue-type quorum --amqp @amqp"
    "sharded_instances $instances --chaos roll --affinity sac --queue-type quorum --amqp @amqp"
    "sharded_instances $instances --chaos close --affinity hash"
    "sharded_instances $instances --chaos broker"
)

# ---- Cleaning up ----------------------------------------------------------------------------
scratch=$(mktemp -d)
server_pid='' epmd_port='' container='' engine='' policy='' postgres_stop=()

clean_up() {
    trap '' INT TERM
    if [[ -n $server_pid ]] && kill -TERM "$server_pid" 2>/dev/null; then
        wait "$server_pid" || true
    fi
    if ((${#postgres_stop[@]} > 0)); then
        "${postgres_stop[@]}" >/dev/null 2>&1 || true
    fi
    # The port mapper is started by Erlang itself and would stay.
    if [[ -n $epmd_port ]]; then
        ERL_EPMD_PORT=$epmd_port epmd -kill >/dev/null 2>&1 || true
    fi
    if [[ -n $container ]]; then
        "$engine" rm --force "$container" >/dev/null || true
    fi
    if [[ -n $policy ]]; then
        rm -f -- "$policy"
    fi
    rm -rf -- "$scratch"
}
trap clean_up EXIT
trap 'exit 130' INT
trap 'exit 143' TERM

# ---- What the machine must have -------------------------------------------------------------
may_install() { [[ -e /etc/debian_version && $(id -u) == 0 ]] && command -v apt-get >/dev/null; }

# Installs Debian packages without starting their services: a service would outlive this script.
install() {
    say "installing $*"
    if [[ ! -e /usr/sbin/policy-rc.d ]]; then
        policy=/usr/sbin/policy-rc.d
        printf '#!/bin/sh\nexit 101\n' >"$policy"
        chmod +x "$policy"
    fi
    local done=0
    export DEBIAN_FRONTEND=noninteractive
    if { apt-get update && apt-get install -y --no-install-recommends "$@"; } \
        >"$scratch/apt.log" 2>&1; then
        done=1
    else
        tail -n 5 "$scratch/apt.log" >&2
        say "could not install $*"
    fi
    if [[ -n $policy ]]; then
        rm -f -- "$policy"
        policy=''
    fi
    ((done))
}

find_tools() {
    if ! command -v cargo >/dev/null && [[ -x ${CARGO_HOME:-${HOME:-}/.cargo}/bin/cargo ]]; then
        PATH=${CARGO_HOME:-$HOME/.cargo}/bin:$PATH
    fi
    command -v cargo >/dev/null ||
        die "cargo is missing: install Rust 1.88 or later (https://rustup.rs), then run this again"
    if ! command -v cc >/dev/null && ! { may_install && install gcc libc6-dev; }; then
        die "cc is missing, which Rust links with: install a C compiler (Debian: gcc libc6-dev)"
    fi
    local component
    for component in fmt:rustfmt clippy:clippy; do
        if ! cargo "${component%:*}" --version >/dev/null 2>&1; then
            say "the Rust component ${component#*:} is missing"
            if ! command -v rustup >/dev/null || ! rustup component add "${component#*:}"; then
                die "install it: rustup component add ${component#*:}"
            fi
        fi
    done
    # Counts instructions. Without it that one step fails, and says so.
    if ! command -v valgrind >/dev/null && may_install; then
        install valgrind || true
    fi
    say "$(cargo --version), $(rustc --version)"
}

# The server's own script. Debian's wrapper in the PATH changes user and ignores the environment.
rabbitmq_program() {
    local candidate
    for candidate in /usr/lib/rabbitmq/bin/rabbitmq-server \
        "$(command -v rabbitmq-server || true)" /usr/local/sbin/rabbitmq-server \
        /opt/rabbitmq/sbin/rabbitmq-server; do
        if [[ -n $candidate && -x $candidate ]]; then
            printf '%s\n' "$candidate"
            return
        fi
    done
    return 1
}

# ---- The broker -----------------------------------------------------------------------------
# Says what answers at a host and port ("RabbitMQ 3.10.8"); fails if nothing does, or something
# that does not speak AMQP 0-9-1. Opens a connection and reads the server's first frame.
greeting() {
    local text
    # shellcheck disable=SC2016  # the inner shell expands them
    text=$(timeout 5 bash -c '
        exec 3<>"/dev/tcp/$0/$1" && printf "AMQP\x00\x00\x09\x01" >&3 &&
            dd bs=8192 count=1 <&3' "$1" "$2" 2>/dev/null |
        LC_ALL=C tr -cs '[:print:]' '\n') || return 1
    [[ $text == *mechanisms* || $text == *productS* ]] || return 1
    printf '%s %s\n' "$(sed -n '/^productS$/{n;p;q}' <<<"$text")" \
        "$(sed -n '/^versionS$/{n;p;q}' <<<"$text")"
}

# Uses the broker that LANEWAY_AMQP_URL names, if it answers. Never prints the credentials.
use_reachable() {
    local pattern='^(amqps?)://([^@/]*@)?(\[[^]]+\]|[^:/?]+)(:([0-9]+))?([/?].*)?$'
    [[ $LANEWAY_AMQP_URL =~ $pattern ]] || die "LANEWAY_AMQP_URL is no amqp:// or amqps:// address"
    local scheme=${BASH_REMATCH[1]} host=${BASH_REMATCH[3]} port=${BASH_REMATCH[5]} what
    host=${host#[} host=${host%]}
    if [[ $scheme == amqps ]]; then
        port=${port:-5671}
        # shellcheck disable=SC2016
        timeout 5 bash -c 'exec 3<>"/dev/tcp/$0/$1"' "$host" "$port" 2>/dev/null || return 1
        what='a broker behind TLS (its version is not asked)'
    else
        port=${port:-5672}
        what=$(greeting "$host" "$port") || return 1
    fi
    say "broker: $what at $host:$port, which was already there"
}

free_port() {
    local port
    for _ in {1..50}; do
        port=$((20000 + RANDOM % 12000))
        # shellcheck disable=SC2016
        if ! timeout 1 bash -c 'exec 3<>"/dev/tcp/127.0.0.1/$0"' "$port" 2>/dev/null; then
            printf '%s\n' "$port"
            return
        fi
    done
    die "no free port found"
}

# Waits until a broker answers at a port and makes it the one to use. The second argument says
# what was started, the rest is a command that fails once the broker can no longer come.
await_broker() {
    local port=$1 started=$2 deadline=$((SECONDS + 120)) what
    shift 2
    until what=$(greeting 127.0.0.1 "$port"); do
        if ((SECONDS > deadline)) || ! "$@" >/dev/null 2>&1; then
            return 1
        fi
        sleep 0.5
    done
    export LANEWAY_AMQP_URL="amqp://guest:guest@127.0.0.1:$port"
    say "broker: $what at 127.0.0.1:$port, started for this run ($started)"
}

start_from_program() {
    local program=$1 port home=$scratch/rabbitmq
    port=$(free_port)
    epmd_port=$(free_port)
    mkdir -p "$home"
    printf '[rabbitmq_consistent_hash_exchange].\n' >"$home/enabled_plugins"
    touch "$home/rabbitmq.conf" "$home/rabbitmq-env.conf"
    # Everything of its own: names, ports, cookie, data. Nothing of an installed service is read.
    env HOME="$home" \
        RABBITMQ_NODENAME="laneway-$$@localhost" \
        RABBITMQ_NODE_IP_ADDRESS=127.0.0.1 \
        RABBITMQ_NODE_PORT="$port" \
        RABBITMQ_DIST_PORT="$(free_port)" \
        RABBITMQ_MNESIA_BASE="$home/data" \
        RABBITMQ_LOG_BASE="$home/log" \
        RABBITMQ_ENABLED_PLUGINS_FILE="$home/enabled_plugins" \
        RABBITMQ_CONFIG_FILE="$home/rabbitmq.conf" \
        RABBITMQ_CONF_ENV_FILE="$home/rabbitmq-env.conf" \
        RABBITMQ_SERVER_ADDITIONAL_ERL_ARGS='-kernel inet_dist_use_interface {127,0,0,1}' \
        ERL_EPMD_PORT="$epmd_port" ERL_EPMD_ADDRESS=127.0.0.1 \
        "$program" >"$home/output" 2>&1 &
    server_pid=$!
    if ! await_broker "$port" "$program" kill -0 "$server_pid"; then
        tail -n 20 "$home/output" >&2
        die "$program did not start (its last output is above)"
    fi
}

start_in_container() {
    local image=${LANEWAY_RABBITMQ_IMAGE:-rabbitmq:4} port
    for engine in docker podman; do
        "$engine" info >/dev/null 2>&1 || continue
        container=$("$engine" run --detach --publish 127.0.0.1::5672 "$image") || continue
        port=$("$engine" port "$container" 5672/tcp | sed -n '1s/.*://p')
        if await_broker "$port" "$engine, $image" "$engine" exec "$container" true; then
            return 0
        fi
        "$engine" logs --tail 20 "$container" >&2 || true
        die "the container of $image did not start (its last output is above)"
    done
    return 1
}

find_broker() {
    local program
    export LANEWAY_AMQP_URL=${LANEWAY_AMQP_URL:-amqp://guest:guest@127.0.0.1:5672}
    if ! rabbitmq_program >/dev/null; then
        say "the program rabbitmq-server is missing"
        if may_install; then
            install rabbitmq-server || true
        fi
    fi
    program=$(rabbitmq_program || true)
    if ! use_reachable; then
        say "no broker answers at the address of LANEWAY_AMQP_URL: starting a private one"
        if [[ -n $program ]]; then
            start_from_program "$program"
        elif ! start_in_container; then
            die "no RabbitMQ: none answers, the program rabbitmq-server is missing and cannot be" \
                "installed here (that takes Debian and root), and no container engine works." \
                "Set LANEWAY_AMQP_URL, or install rabbitmq-server, docker or podman."
        fi
    fi
    if [[ -z $program ]]; then
        say "warning: tests that kill or restart a broker need the program rabbitmq-server and" \
            "will FAIL without it"
    fi
}

# ---- The database ---------------------------------------------------------------------------
postgres_answers() {
    local pattern='^postgres(ql)?://([^@/]*@)?(\[[^]]+\]|[^:/?]+)(:([0-9]+))?([/?].*)?$'
    [[ $LANEWAY_POSTGRES_URL =~ $pattern ]] ||
        die "LANEWAY_POSTGRES_URL is no postgres:// address with a host"
    local host=${BASH_REMATCH[3]} port=${BASH_REMATCH[5]:-5432}
    host=${host#[} host=${host%]}
    # shellcheck disable=SC2016  # the inner shell expands them
    timeout 5 bash -c 'exec 3<>"/dev/tcp/$0/$1"' "$host" "$port" 2>/dev/null || return 1
    say "database: something answers at $host:$port, and is taken for PostgreSQL"
}

# The folder of the server's programs, the newest version last.
postgres_programs() {
    local folder found=''
    for folder in /usr/lib/postgresql/*/bin /usr/local/pgsql/bin /usr/local/bin /usr/bin; do
        if [[ -x $folder/initdb && -x $folder/pg_ctl ]]; then
            found=$folder
            [[ $folder != /usr/lib/postgresql/* ]] && break
        fi
    done
    [[ -n $found ]] && printf '%s\n' "$found"
}

find_postgres() {
    export LANEWAY_POSTGRES_URL=${LANEWAY_POSTGRES_URL:-postgres://postgres@127.0.0.1:5432/test}
    postgres_answers && return
    say "no PostgreSQL answers at the address of LANEWAY_POSTGRES_URL: starting a private one"
    local programs port data=$scratch/postgres as=()
    if ! programs=$(postgres_programs) && may_install; then
        install postgresql || true
        programs=$(postgres_programs || true)
    fi
    if [[ -z $programs ]]; then
        say "warning: PostgreSQL is missing and cannot be installed here (that takes Debian and root):" \
            "its tests will FAIL. Set LANEWAY_POSTGRES_URL, or install postgresql."
        return
    fi
    mkdir -p "$data"
    # The server refuses to run as root.
    if [[ $(id -u) == 0 ]]; then
        chown postgres "$data"
        chmod 755 "$scratch"
        as=(runuser -u postgres --)
    fi
    port=$(free_port)
    if "${as[@]}" "$programs/initdb" -D "$data/data" -A trust -U postgres >"$scratch/initdb.log" 2>&1 &&
        "${as[@]}" "$programs/pg_ctl" -D "$data/data" -l "$data/log" -w start \
            -o "-p $port -k $data -c listen_addresses=127.0.0.1 -c max_connections=200" \
            >"$scratch/pg_ctl.log" 2>&1; then
        postgres_stop=("${as[@]}" "$programs/pg_ctl" -D "$data/data" -m immediate stop)
        export LANEWAY_POSTGRES_URL=postgres://postgres@127.0.0.1:$port/postgres
        say "database: PostgreSQL at 127.0.0.1:$port, started for this run ($programs)"
    else
        tail -n 5 "$scratch/initdb.log" "$scratch/pg_ctl.log" >&2 || true
        say "warning: a private PostgreSQL could not be started: its tests will FAIL"
    fi
}

# ---- The steps ------------------------------------------------------------------------------
failed=()
step() {
    local name=$1 began=$SECONDS
    shift
    printf '\n'
    say "$name"
    if "$@"; then
        say "$name: ok after $((SECONDS - began)) s"
    else
        failed+=("$name")
        say "$name: FAILED after $((SECONDS - began)) s"
    fi
}

run_examples() {
    local line file name words
    for file in examples/*.rs examples/*/main.rs; do
        [[ -e $file ]] || continue
        name=${file#examples/} name=${name%/main.rs} name=${name%.rs}
        if [[ " ${examples[*]/%/ } " != *" $name "* ]]; then
            step "example $name" die_unlisted "$file"
        fi
    done
    for line in "${examples[@]}"; do
        read -r -a words <<<"$line"
        words=("${words[@]/#@amqp/"$LANEWAY_AMQP_URL"}")
        words=("${words[@]/#@postgres/"$LANEWAY_POSTGRES_URL"}")
        step "example $line" \
            cargo run --locked --release --quiet --features sqlite,postgres --example "${words[0]}" -- "${words[@]:1}"
    done
}

# What a message costs, as counted by valgrind: without order and with it, and in batches.
count_costs() {
    if ! command -v valgrind >/dev/null; then
        say "valgrind is missing and cannot be installed here (that takes Debian and root): install it"
        return 1
    fi
    cargo bench --locked --quiet --package laneway --bench path_cost
}

die_unlisted() {
    say "$1 is in no line of the list of examples in tests/run.sh"
    return 1
}

find_tools
find_broker
find_postgres

step 'formatting' cargo fmt --all --check
step 'clippy' cargo clippy --locked --workspace --all-targets -- -D warnings
step 'clippy without the default features' \
    cargo clippy --locked --package laneway --no-default-features -- -D warnings
step 'clippy with both stores' cargo clippy --locked --package laneway --features sqlite,postgres \
    --all-targets -- -D warnings
step 'clippy with TLS' cargo clippy --locked --package laneway --features tls -- -D warnings
for store in sqlite postgres; do
    step "clippy with the store $store alone" cargo clippy --locked --package laneway \
        --no-default-features --features "$store" --lib --tests -- -D warnings
done
step 'documentation' \
    env RUSTDOCFLAGS='-D warnings' cargo doc --locked --workspace --no-deps
# With the stores, for the durable queues; the examples that tests run are built with them.
step 'tests' cargo test --locked --workspace --features laneway/sqlite,laneway/postgres \
    --no-fail-fast
step 'examples build' cargo build --locked --release --package laneway --features sqlite,postgres \
    --examples
run_examples
step 'cost of a message' count_costs

printf '\n'
if ((${#failed[@]} > 0)); then
    say "FAILED after $SECONDS s:$(printf ' %s;' "${failed[@]}")"
    exit 1
fi
say "all steps passed after $SECONDS s"
