//! Functions that several tests of this folder use.

use std::collections::{BTreeMap, BTreeSet};
use std::path::{Path, PathBuf};
use std::sync::mpsc::channel;
use std::time::Duration;

use cadastre_core::Addr;
use cadastre_node::store_thread::{CallTimes, StoreHandle};
use cadastre_node::{Attachment, Now, Op, OpError, OpOutcome, Snapshot, Store, clock};
use tempfile::TempDir;

use crate::rng::{Rng, seed};
use crate::world::allocation;

/// A time limit for locks and answers. A test that succeeds never waits this long.
pub const WAIT: Duration = Duration::from_secs(20);

/// The directory of a node, with paths for a store and for an agent's socket.
pub struct NodeDir(TempDir);

impl NodeDir {
    pub fn empty() -> Self {
        Self(tempfile::tempdir().unwrap())
    }

    /// Returns a directory with a store that has a block of each family.
    pub fn with_store() -> Self {
        let dir = Self::empty();
        let mut store = Store::open(&dir.store(), WAIT).unwrap();
        let allocation = allocation(&["10.0.0.0/25", "fd00::/112"]);
        store.set_allocation(&allocation, &clock::now()).unwrap();
        dir
    }

    pub fn path(&self) -> &Path {
        self.0.path()
    }

    pub fn store(&self) -> PathBuf {
        self.path().join("state/node.redb")
    }

    pub fn open(&self) -> Store {
        Store::open_existing(&self.store(), WAIT).unwrap()
    }

    pub fn attachments(&self) -> BTreeMap<Attachment, Vec<Addr>> {
        attachments(&self.open().snapshot(&clock::now()).unwrap())
    }
}

/// Returns the addresses of each attachment. Panics if an address belongs to two attachments.
pub fn attachments(snapshot: &Snapshot) -> BTreeMap<Attachment, Vec<Addr>> {
    let mut addresses = BTreeSet::new();
    for addr in snapshot.attachments.iter().flat_map(|it| it.given.addrs()) {
        assert!(addresses.insert(addr), "{addr} belongs to two attachments");
    }
    let attachments = snapshot.attachments.iter();
    let of_one = attachments.map(|it| (it.attachment.clone(), it.given.addrs().collect()));
    of_one.collect()
}

/// Performs one operation in a transaction of its own.
pub fn run(store: &mut Store, op: &Op, now: &Now) -> Result<OpOutcome, OpError> {
    store.run(std::slice::from_ref(op), now).remove(0)
}

/// Sends a request to a store thread, and waits for the answer.
pub fn send(handle: &StoreHandle, op: Op, call: CallTimes) -> Result<OpOutcome, OpError> {
    let (sender, receiver) = channel();
    handle.ask(op, call, Box::new(move |it| sender.send(it).unwrap()));
    receiver.recv().unwrap()
}

/// Returns the times of a call that is made now, with a long deadline.
pub fn call() -> CallTimes {
    CallTimes::until(clock::since_boot() + WAIT)
}

/// Returns the addresses that an ADD got.
pub fn assigned(answer: &Result<OpOutcome, OpError>) -> Vec<Addr> {
    let Ok(OpOutcome::Assigned(given)) = answer else {
        panic!("{answer:?}")
    };
    given.addrs().collect()
}

/// Chooses a seed for a test, and prints the seed. Returns the seed, and a generator of random numbers that starts from
/// the seed.
pub fn seeded() -> (u64, Rng) {
    let seed = seed();
    eprintln!("SEED={seed}");
    (seed, Rng::new(seed))
}
