-- What an operator asked for: pause, drain, or run again. It holds for every process on the outbox and survives restarts;
-- no row means run.
create table postrider_control (
    -- schema.table, each part at most 63 bytes.
    outbox       text primary key check (octet_length(outbox) <= 127),
    desired      text not null check (desired in ('run', 'pause', 'drain')),
    -- Up to where a drain runs: an LSN in wal mode, a snapshot in poll mode.
    drain_target text,
    requested_at timestamptz not null default now()
);
