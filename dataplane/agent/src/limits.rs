// SPDX-License-Identifier: Apache-2.0
//! Every limit of the agent, in one place.
//!
//! A root process in the sandbox may do anything short of killing PID 1, so nothing here may grow
//! without a bound: each limit ends in a typed error, never in an unbounded queue.

use std::time::Duration;

/// Open TCP connections; further ones wait in the listen backlog. An idle one costs 13 KiB.
pub const CONNECTIONS_MAX: usize = 2048;
/// Connections that wait to be taken.
pub const LISTEN_BACKLOG: u32 = 1024;
/// Time for a request head to arrive. It also ends idle keep-alive connections, so a client pool
/// must drop its idle connections earlier than this.
pub const REQUEST_HEAD_TIMEOUT: Duration = Duration::from_secs(120);
/// Largest read buffer of one connection; also bounds the size of a request head.
pub const CONNECTION_BUFFER_BYTES_MAX: usize = 128 * 1024;
/// Pause after `accept` fails for lack of descriptors or memory.
pub const ACCEPT_RETRY_DELAY: Duration = Duration::from_millis(50);

/// Largest body of a unary call and largest message in a client stream.
pub const MESSAGE_BYTES_MAX: usize = 16 * 1024 * 1024;
/// Sum of all unary bodies held in memory at once.
pub const BUFFERED_BODIES_BYTES_MAX: usize = 64 * 1024 * 1024;

/// Open response streams (process, watch) together.
pub const STREAMS_MAX: usize = 2000;
/// Processes started through the API that have not ended.
pub const PROCESSES_MAX: usize = 1024;
/// Arguments and environment of one command, in bytes; the kernel's own limit is near this.
pub const EXEC_BYTES_MAX: usize = 2 * 1024 * 1024;
/// Time from fork to exec; a longer one means that the program lies on a hung file system.
pub const EXEC_TIMEOUT: Duration = Duration::from_secs(10);
/// How often the agent looks whether an orphaned program is still there.
pub const ORPHAN_CHECK_INTERVAL: Duration = Duration::from_secs(1);
/// Unclaimed exit statuses that are kept, and for how long: a program and its keeper may die
/// before the agent has heard of the program.
pub const UNCLAIMED_EXITS_MAX: usize = 4096;
/// See `UNCLAIMED_EXITS_MAX`; as long as starting may take.
pub const UNCLAIMED_EXIT_AGE: Duration = EXEC_TIMEOUT;
/// Largest piece of output in one event.
pub const OUTPUT_CHUNK_BYTES: usize = 32 * 1024;
/// Output events waiting for one subscriber; with the chunk size this is 256 KiB. When they are
/// full, the process is held back by its pipe.
pub const OUTPUT_QUEUE_EVENTS: usize = 8;
/// A client that takes nothing for this long loses its stream, so that it cannot hold the process
/// back for ever.
pub const STREAM_STALL_MAX: Duration = Duration::from_secs(300);
/// How long the end of a command waits for a descendant to close the output pipes.
pub const OUTPUT_GRACE: Duration = Duration::from_millis(100);
/// One of the two files with the latest output of a sandbox's start command.
pub const START_LOG_BYTES_MAX: u64 = 256 * 1024;
/// Programs whose outcome is kept for the node; it takes each soon after the end.
pub const KEPT_MAX: usize = 256;
/// What may be kept of one output of such a program.
pub const KEPT_OUTPUT_BYTES_MAX: usize = 1024 * 1024;
/// What the outputs of all of them may take.
pub const KEPT_BYTES_MAX: usize = 16 * 1024 * 1024;
/// Longest tag of one.
pub const KEPT_TAG_BYTES_MAX: usize = 512;
/// Used tags that are remembered when nothing else of the program is.
pub const KEPT_VOID_MAX: usize = 4096;
/// Longest wait of one question for an end.
pub const KEPT_WAIT_MAX: Duration = Duration::from_secs(60);
/// How long a late `Connect` still gets the exit status.
pub const EXIT_RETENTION: Duration = Duration::from_secs(30);
/// Default time between keepalive events of an idle stream.
pub const KEEPALIVE_DEFAULT: Duration = Duration::from_secs(90);
/// Rounds of stopping and killing a process tree; each finds every process of the round before.
pub const KILL_ROUNDS_MAX: usize = 200;
/// OOM score of started programs: they go before the agent does.
pub const CHILD_OOM_SCORE_ADJ: i32 = 100;

/// Directory watches (streams and polled watchers) together.
pub const WATCHERS_MAX: usize = 128;
/// Directories under one recursive watch.
pub const WATCH_DIRS_MAX: usize = 65_536;
/// Events a polled watcher holds until they are fetched.
pub const WATCH_EVENTS_MAX: usize = 16_384;
/// A polled watcher that nobody asked for this long may make room for a new one.
pub const WATCHER_IDLE: Duration = Duration::from_secs(600);
/// How long the second half of a rename inside a watched tree may take to appear.
pub const RENAME_PAIR_DELAY: Duration = Duration::from_millis(100);

/// Entries in one directory listing.
pub const LIST_ENTRIES_MAX: usize = 100_000;
/// Longest path, as in the kernel (`PATH_MAX`).
pub const PATH_BYTES_MAX: usize = 4096;

/// Piece of a file moved at once between disk and network.
pub const FILE_CHUNK_BYTES: usize = 256 * 1024;
/// Head of one multipart part.
pub const PART_HEAD_BYTES_MAX: usize = 16 * 1024;
/// Files in one multipart upload.
pub const UPLOAD_FILES_MAX: usize = 10_000;
/// Longest metadata key: 255 bytes of a Linux xattr name less the `user.e2b.` prefix.
pub const METADATA_KEY_BYTES_MAX: usize = 246;
/// All metadata of one file, names with prefix plus values.
pub const METADATA_BYTES_MAX: usize = 4096;
/// Files named in one compose call.
pub const COMPOSE_SOURCES_MAX: usize = 10_000;

/// Threads for file work. Few, because each may touch the heap arena and a stack.
pub const BLOCKING_THREADS_MAX: usize = 16;
/// Stack of such a thread.
pub const BLOCKING_STACK_BYTES: usize = 256 * 1024;
/// Idle time after which such a thread ends.
pub const BLOCKING_IDLE: Duration = Duration::from_secs(5);

/// Archives unpacked at once; further ones wait. A zstd archive may need a window of 128 MiB.
pub const UNPACKS_MAX: usize = 2;
/// Pieces of an archive that wait to be unpacked.
pub const UNPACK_QUEUE_PIECES: usize = 8;
/// Stack of a thread that unpacks.
pub const UNPACK_STACK_BYTES: usize = 1024 * 1024;
/// A caller that sends nothing for this long while an archive is unpacked has given up.
pub const UNPACK_SILENCE_MAX: Duration = Duration::from_secs(300);

/// How often memory that calls have used is given back when nothing is going on.
pub const IDLE_TRIM_INTERVAL: Duration = Duration::from_secs(10);

/// Largest `/etc/passwd` or `/etc/group` that is read.
pub const USER_FILE_BYTES_MAX: u64 = 4 * 1024 * 1024;
/// Time to connect to a port inside the sandbox.
pub const TUNNEL_CONNECT_TIMEOUT: Duration = Duration::from_secs(2);
/// Copy buffer of a tunnel, each way.
pub const TUNNEL_BUFFER_BYTES: usize = 32 * 1024;
/// Time that processes get between SIGTERM and SIGKILL when the agent is told to stop.
pub const SHUTDOWN_GRACE: Duration = Duration::from_secs(2);
