CREATE TABLE outbox_messages (
    id $ID PRIMARY KEY,
    type varchar(255) NOT NULL,
    content $CONTENT NOT NULL,
    occurred_on_utc timestamptz NOT NULL,
    processed_on_utc timestamptz,
    error varchar(40),
    key text,
    headers jsonb,
    exchange text,
    routing_key text,
    tenant text
);
CREATE INDEX outbox_waiting ON outbox_messages (occurred_on_utc, id) WHERE processed_on_utc IS NULL AND error IS NULL;
