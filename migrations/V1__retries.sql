-- Rows the broker (or our own validation) rejected, waiting for another attempt.
--
-- A row is copied here in the transaction that records its batch: that is its durable verdict, so position and claim
-- move on and one bad row holds nothing back. The copy is complete, because with ack.rows = 'delete' the row is gone.
create table postrider_retries (
    seq             bigint generated always as identity primary key,
    -- What consumers deduplicate on; the row's id as text. Of any length: see the index below.
    message_id      text not null,
    type            text not null,
    -- The body as it is published, byte for byte; content_kind decides the content_type.
    content         bytea not null,
    content_kind    text not null check (content_kind in ('json', 'text', 'bytes')),
    occurred_on     timestamptz,
    key             text,
    -- The JSON text of the row's headers column.
    headers         text,
    -- The row's own exchange and routing key, not the configured templates' results: a corrected template applies.
    exchange        text,
    routing_key     text,
    -- JSON object text of the further columns that templates name.
    columns         text,
    attempts        integer not null check (attempts > 0),
    -- The class of the last rejection, and the words it came with.
    reason          text not null,
    detail          text not null,
    first_failed_at timestamptz not null default now(),
    last_failed_at  timestamptz not null default now(),
    next_attempt_at timestamptz not null
);

-- Read in this order, a few at a time, by whoever makes the next attempts.
create index postrider_retries_due on postrider_retries (next_attempt_at);

-- By hash: an index entry may not exceed about 2,700 bytes, a text id may.
create index postrider_retries_message on postrider_retries (hashtextextended(message_id, 0));
