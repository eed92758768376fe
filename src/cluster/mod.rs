//! The edge to the API server.
//!
//! | file | what it holds |
//! |---|---|
//! | [`seen`] | what watches say, in the fields that decisions need |
//! | [`table`] | one kind's objects as last seen, relists compared |
//! | [`pods`], [`addresses`] | which addresses pods and nodes report |
//! | [`world`] | all of it together |
//! | [`request`] | requests and their outcomes as values |

pub mod addresses;
pub mod pods;
pub mod request;
pub mod seen;
pub mod table;
pub mod world;
