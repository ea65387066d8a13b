# What our compose file asks of PostgreSQL's image, for the image made here: a cluster made once, as the user postgres,
# with a password from a file and the scripts of /docker-entrypoint-initdb.d run over the local socket.
set -euo pipefail
export POSTGRES_USER=${POSTGRES_USER:-postgres}
if [ "$(id -u)" = 0 ]; then
    POSTGRES_PASSWORD=$(cat "$POSTGRES_PASSWORD_FILE")
    export POSTGRES_PASSWORD
    chown postgres "$PGDATA"
    chmod 700 "$PGDATA"
    exec setpriv --reuid=postgres --regid=postgres --clear-groups bash "$0" "$@"
fi
if [ ! -s "$PGDATA/PG_VERSION" ]; then
    # shellcheck disable=SC2086 # several arguments in one variable, as the real image takes them
    initdb --username="$POSTGRES_USER" --pwfile=<(echo "$POSTGRES_PASSWORD") --auth-local=trust --auth-host=scram-sha-256 \
        $POSTGRES_INITDB_ARGS
    echo "host all all all scram-sha-256" >>"$PGDATA/pg_hba.conf"
    echo "listen_addresses = '*'" >>"$PGDATA/postgresql.conf"
    pg_ctl -w start -o "-c listen_addresses=''"
    for script in /docker-entrypoint-initdb.d/*.sh; do
        # shellcheck source=/dev/null
        . "$script"
    done
    pg_ctl -w stop -m fast
fi
unset POSTGRES_PASSWORD
exec "$@"
