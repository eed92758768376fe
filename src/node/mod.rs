//! The addresses of one node: what it holds, and who has which address.
//!
//! The node's agent and, where no agent answers, the CNI plugin itself work on the same durable store
//! with the same code. Nothing here knows Kubernetes, an async runtime or a clock: callers pass
//! [`Now`].
//!
//! | file | subject |
//! |---|---|
//! | `holding` | what the node may give addresses from, as its NodeSubnet says: [`Holding`] |
//! | `ops` | what is asked and answered: [`Op`], [`Answer`], [`Refusal`] |

mod holding;
mod ops;

pub use holding::{Block, Dns, FamilyTerms, Gateway, Holding, PoolTerms, Prefix, Route};
pub use ops::{
    Add, Answer, Attachment, Check, Gc, Given, GivenAddress, Now, Op, PodRef, Refusal, Why,
};
