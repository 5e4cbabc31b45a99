-- How far each outbox has been recorded: one row an outbox, written in the transaction that records a batch.
--
-- A slot's own position may fall back when PostgreSQL crashes, and it knows only whole transactions. After any start
-- the relay skips what this row covers, so that neither repeats what was recorded. It is ignored, not trusted, when
-- the system identifier, the timeline or the slot are not those it was written under.
create table postrider_progress (
    -- schema.table, each part at most 63 bytes.
    outbox            text primary key check (octet_length(outbox) <= 127),
    mode              text not null,
    slot              text,
    system_identifier text,
    timeline          integer,
    -- The transaction that is recorded in part, by the LSN of its commit, and how many of its rows are.
    commit_lsn        pg_lsn,
    rows_done         bigint not null default 0,
    -- The position that may be acknowledged: everything at or before it has a durable verdict.
    flush_lsn         pg_lsn,
    -- Whether the rows that were there before the stream have been delivered, how far that got, and the LSN up to which
    -- the stream may repeat them.
    sweep             text not null default 'pending' check (sweep in ('pending', 'done')),
    sweep_cursor      text,
    sweep_end_lsn     pg_lsn,
    updated_at        timestamptz not null default now()
)
-- One small row updated many times a second: room on its page keeps every update on it.
with (fillfactor = 10);
