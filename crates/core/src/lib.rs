//! The core of Cadastre: address arithmetic, pools, and the ledger that records which range has which holder.
//!
//! In function names and comments, *to carve* means to choose the next free block of a pool, and to record a holding of
//! this block.
//!
//! | file | subject |
//! |---|---|
//! | `cidr` | [`Family`], [`Addr`], [`Cidr`]: one code path for IPv4 and IPv6 |
//! | `text` | parsing of addresses and CIDRs: strictly, and as leniently as old API servers did |
//! | `ip_range` | [`IpRange`]: an interval that need not be a CIDR |
//! | `dual` | [`Dual`]: one value for each family |
//! | `pool` | [`Pool`]: which blocks may be allocated, and where the next search starts |
//! | `family_pool` | one family of a [`Pool`]: its CIDRs, its cursor, and the blocks that may be allocated |
//! | `holdings` | storage of [`Holding`]s, listed by holder |
//! | `space`, `fits`, `search` | a trie of the covered and the free space of one family |
//! | `ledger` | [`RangeLedger`]: every holding, by interval, holder and id |
//! | `serde` | addresses, CIDRs and intervals are serialized as text |
//! | `carve` | allocation: the next free block, or given ranges: [`RangeLedger::carve`], [`RangeLedger::take`] |
//! | [`node_allocation`] | the ranges from which a node may assign addresses, and the terms of their pools |
//! | [`mod@usable`] | which addresses of a block may be assigned, and with which gateway |
//! | [`inert`] | escaping of untrusted text before it is displayed |
//! | [`mutation`] | deliberate bugs, in test builds only |
//!
//! Nothing here does I/O, reads a clock, locks, or panics on any input.

#![warn(unreachable_pub)]

mod carve;
mod cidr;
mod dual;
mod family_pool;
mod fits;
mod holdings;
pub mod inert;
mod ip_range;
mod ledger;
pub mod mutation;
pub mod node_allocation;
mod pool;
mod search;
mod serde;
mod space;
#[cfg(test)]
mod testing;
mod text;
pub mod usable;

pub use carve::{BlockCounts, Obstacle, PoolExhausted};
pub use cidr::{Addr, Cidr, Family};
pub use dual::Dual;
pub use family_pool::{FamilyRanges, ReservedEffect};
pub use holdings::{Holder, Holding, HoldingId, HoldingState};
pub use ip_range::{IpRange, IpRangeError};
pub use ledger::RangeLedger;
pub use pool::Pool;
pub use text::CidrError;

/// The version of this build, from `Cargo.toml`.
pub const VERSION: &str = env!("CARGO_PKG_VERSION");

/// The git commit of this build, from `CADASTRE_COMMIT` at compile time, or `unknown`.
pub const COMMIT: &str = match option_env!("CADASTRE_COMMIT") {
    Some(commit) => commit,
    None => "unknown",
};
