//! The pure core of Cadastre: intervals, pools, the ledger of who holds what, and what others decide with.
//!
//! | file | subject |
//! |---|---|
//! | `cidr` | [`Family`], [`Addr`], [`Cidr`]: one code path for IPv4 and IPv6 |
//! | `text` | reading addresses and CIDRs, strictly and as old API servers stored them |
//! | `span` | [`Span`]: an interval that need not be a CIDR |
//! | `dual` | [`Dual`]: one value a family |
//! | `pool` | [`Pool`]: what may be carved, what is blocked, where the search goes on |
//! | `part` | the same of one family: what is open, and the cursor |
//! | `claims` | [`Claim`]s in a slab, listed by holder |
//! | `space`, `fits`, `search` | the covered and the free space of one family, as a trie |
//! | `ledger` | [`Ledger`]: every claim, by interval, holder and id |
//! | `serde` | addresses, CIDRs and spans as text |
//! | `carve` | finding the next free block: [`Ledger::carve`], [`Ledger::room`] |
//! | [`holding`] | what a node may give addresses from, and on what terms |
//! | [`mod@usable`] | what of a block may be given, and with which gateway |
//! | [`inert`] | text of others, before people see it |
//! | [`mutation`] | bugs made on purpose, in builds for tests alone |
//!
//! Nothing here does I/O, reads a clock or panics on input. The caller serialises access.

#![warn(unreachable_pub)]

mod carve;
mod cidr;
mod claims;
mod dual;
mod fits;
pub mod holding;
pub mod inert;
mod ledger;
pub mod mutation;
mod part;
mod pool;
mod search;
mod serde;
mod space;
mod span;
mod text;
pub mod usable;

pub use carve::{Full, Room};
pub use cidr::{Addr, Cidr, Family};
pub use claims::{Claim, ClaimId, Holder, State};
pub use dual::Dual;
pub use ledger::Ledger;
pub use part::{Closing, Ranges};
pub use pool::Pool;
pub use span::{Span, SpanError};
pub use text::CidrError;

/// The version of this build.
pub const VERSION: &str = env!("CARGO_PKG_VERSION");

/// The commit of this build, where the build was told (`CADASTRE_COMMIT`).
pub const COMMIT: &str = match option_env!("CADASTRE_COMMIT") {
    Some(commit) => commit,
    None => "unknown",
};
