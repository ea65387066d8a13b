"""Chorus in containers: what compose.yaml's containers run beside the services themselves.

setup    once per start, first    passwords, the bus's permission table, one file of variables per service
model    once per start           the model where the replicas find it, then the catalog that names it
start    in every service         those variables into the environment, then the service in its own place
health   every few seconds        whether /readyz says yes
keys     once per start, last     the first API keys, shown in its log

/run/chorus/   (a volume; each file is readable by the one user that needs it)
    credentials.json        every password, for setup alone
    nats.conf  valkey.conf  valkey.password  postgres.password
    <service>.env           addresses, and that service's own password
    models/catalog.json     what is served
    keys/keys.json          the first keys
"""
