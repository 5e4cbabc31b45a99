-- Rows that were rejected publish.max_attempts times: parked until a person requeues or discards them.
--
-- The columns are those of postrider_retries, so that a requeue is one insert ... select the other way.
create table postrider_dead_letters (
    seq             bigint generated always as identity primary key,
    message_id      text not null,
    type            text not null,
    content         bytea not null,
    content_kind    text not null check (content_kind in ('json', 'text', 'bytes')),
    occurred_on     timestamptz,
    key             text,
    headers         text,
    exchange        text,
    routing_key     text,
    columns         text,
    attempts        integer not null check (attempts > 0),
    reason          text not null,
    detail          text not null,
    first_failed_at timestamptz not null default now(),
    last_failed_at  timestamptz not null default now(),
    parked_at       timestamptz not null default now()
);

-- The order in which they are listed.
create index postrider_dead_letters_parked on postrider_dead_letters (parked_at);

-- By hash, as in postrider_retries.
create index postrider_dead_letters_message on postrider_dead_letters (hashtextextended(message_id, 0));
