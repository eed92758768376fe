//! stub
#![allow(missing_docs)]
use std::{sync::Arc, time::Duration};
pub type Mono = Duration;
#[derive(Clone, Debug, PartialEq)]
pub enum Leadership { Standby { leader: Option<String> }, Leading(Tenure), Released }
#[derive(Clone, Debug, PartialEq)]
pub struct Tenure { pub term: Arc<str>, pub takeover: Takeover, pub valid_until: Mono }
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Takeover { First, Clean, Unclean }
