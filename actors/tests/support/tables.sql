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

CREATE TABLE postrider_retries (
    seq bigint GENERATED ALWAYS AS IDENTITY PRIMARY KEY,
    message_id text NOT NULL,
    type text NOT NULL,
    content bytea NOT NULL,
    content_kind text NOT NULL CHECK (content_kind IN ('json', 'text', 'bytes')),
    occurred_on timestamptz,
    key text,
    headers text,
    exchange text,
    routing_key text,
    columns text,
    attempts integer NOT NULL CHECK (attempts > 0),
    reason text NOT NULL,
    detail text NOT NULL,
    first_failed_at timestamptz NOT NULL DEFAULT now(),
    last_failed_at timestamptz NOT NULL DEFAULT now(),
    next_attempt_at timestamptz NOT NULL
);
CREATE INDEX postrider_retries_due ON postrider_retries (next_attempt_at);
CREATE INDEX postrider_retries_message ON postrider_retries (hashtextextended(message_id, 0));

CREATE TABLE postrider_dead_letters (
    seq bigint GENERATED ALWAYS AS IDENTITY PRIMARY KEY,
    message_id text NOT NULL,
    type text NOT NULL,
    content bytea NOT NULL,
    content_kind text NOT NULL CHECK (content_kind IN ('json', 'text', 'bytes')),
    occurred_on timestamptz,
    key text,
    headers text,
    exchange text,
    routing_key text,
    columns text,
    attempts integer NOT NULL CHECK (attempts > 0),
    reason text NOT NULL,
    detail text NOT NULL,
    first_failed_at timestamptz NOT NULL DEFAULT now(),
    last_failed_at timestamptz NOT NULL DEFAULT now(),
    parked_at timestamptz NOT NULL DEFAULT now()
);
CREATE INDEX postrider_dead_letters_message ON postrider_dead_letters (hashtextextended(message_id, 0));

CREATE TABLE postrider_progress (
    outbox text PRIMARY KEY,
    mode text NOT NULL,
    slot text,
    system_identifier text,
    timeline integer,
    commit_lsn pg_lsn,
    rows_done bigint NOT NULL DEFAULT 0,
    flush_lsn pg_lsn,
    sweep text NOT NULL DEFAULT 'pending' CHECK (sweep IN ('pending', 'done')),
    sweep_cursor text,
    sweep_end_lsn pg_lsn,
    updated_at timestamptz NOT NULL DEFAULT now()
);

CREATE TABLE postrider_control (
    outbox text PRIMARY KEY,
    desired text NOT NULL CHECK (desired IN ('run', 'pause', 'drain')),
    drain_target text,
    requested_at timestamptz NOT NULL DEFAULT now()
);
