//! JSON as Go reads and writes it.
//!
//! A network configuration is read by every plugin of a chain, all of them in Go, so what Go's
//! `encoding/json` takes is what is taken here: keys without regard to case, unknown keys, repeated
//! keys (the last one counts), `null` for any value. Faults get the same texts, for they reach people
//! through the events of pods.
//!
//! | file | subject |
//! |---|---|
//! | `read` | text to [`Doc`], a flat list of nodes: no recursion on what strangers nest |
//! | `decode` | [`Doc`] to values, with Go's errors about types |
//! | `write` | [`Out`] to text |

mod decode;
mod read;
mod write;

pub(super) use decode::{Decoder, Stop};
pub(super) use read::{Doc, Item, Kind};
pub(super) use write::Out;
