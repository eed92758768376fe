//! The edge to the API server.
//!
//! | file | what it holds |
//! |---|---|
//! | [`seen`] | what watches say, in the fields that decisions need |
//! | [`table`] | one kind's objects as last seen, relists compared |
//! | [`request`] | requests and their outcomes as values |

pub mod request;
pub mod seen;
pub mod table;
