# Run once by PostgreSQL's image when it makes its cluster, as the superuser on the local socket. Chorus owns its
# database and is no superuser; the superuser keeps no password, so that nobody logs in as him over the network.
psql -v ON_ERROR_STOP=1 -v password="$POSTGRES_PASSWORD" --no-psqlrc --username "$POSTGRES_USER" <<'SQL'
CREATE ROLE chorus LOGIN CREATEDB PASSWORD :'password';
CREATE DATABASE chorus OWNER chorus;
ALTER ROLE CURRENT_USER PASSWORD NULL;
SQL
