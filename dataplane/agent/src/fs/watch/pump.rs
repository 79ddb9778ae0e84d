// SPDX-License-Identifier: Apache-2.0
//! Moves events from a watched tree to whoever waits for them.

use std::os::fd::OwnedFd;
use std::sync::Arc;

use tokio::io::unix::AsyncFd;
use tokio::sync::mpsc;

use super::tree::{Batch, Options, Tree};
use crate::agent::Agent;
use crate::connect::RpcError;
use crate::limits::RENAME_PAIR_DELAY;
use crate::sys::pool;

/// Batches between the tree and the receiver. A receiver that is slow leaves the rest in the
/// kernel's queue, which says when it overflows.
const QUEUE_BATCHES: usize = 1;

/// What a receiver gets: events, or the error that ends the watch.
pub type Events = Result<Vec<String>, RpcError>;

/// Begins a watch and gives its events. It ends when the receiver is dropped.
///
/// Errors: those of `Tree::open`.
pub async fn open(
    agent: &Arc<Agent>,
    options: Options,
) -> Result<mpsc::Receiver<Events>, RpcError> {
    let known = Arc::clone(agent);
    let tree = pool::run(move || Tree::open(options, known.users.snapshot()))
        .await
        .map_err(|err| RpcError::from_io("watching", &err))??;
    // SAFETY: the descriptor is owned in common with the tree, so it stays open and the same as
    // long as it is watched.
    let fd = unsafe { AsyncFd::register(tree.fd()) }
        .map_err(|err| RpcError::from_io("watching", &err.into()))?;
    let (queue, events) = mpsc::channel(QUEUE_BATCHES);
    tokio::spawn(run(Arc::clone(agent), tree, fd, queue));
    Ok(events)
}

async fn run(
    agent: Arc<Agent>,
    tree: Tree,
    fd: AsyncFd<Arc<OwnedFd>>,
    queue: mpsc::Sender<Events>,
) {
    let mut tree = tree;
    loop {
        let ready = tokio::select! {
            ready = fd.readable() => ready.ok(),
            () = tokio::time::sleep(RENAME_PAIR_DELAY), if tree.is_unsettled() => None,
            () = queue.closed() => return,
        };
        let known = Arc::clone(&agent);
        let look = pool::run(move || {
            let batch = tree.take(known.users.snapshot());
            (tree, batch)
        });
        let (back, batch) = match look.await {
            Ok((back, batch)) => (back, batch),
            Err(err) => {
                let _ = queue.send(Err(RpcError::from_io("watching", &err))).await;
                return;
            }
        };
        tree = back;
        let sent = match batch {
            Ok(Batch { events, more }) => {
                if !more && let Some(mut ready) = ready {
                    ready.clear_ready();
                }
                events.is_empty() || queue.send(Ok(events)).await.is_ok()
            }
            Err(err) => {
                let _ = queue.send(Err(err)).await;
                false
            }
        };
        if !sent {
            return;
        }
    }
}
