//! The ranges in writes of NodeRoutes and FRRConfigurations whose outcome is not known yet.
//!
//! The block loop uses them together with the cache: a range must not become free while any of these objects lists it,
//! or may soon list it.

use std::collections::{BTreeMap, BTreeSet};

use crate::cluster::names::NodeName;
use crate::cluster::request::ObjectKind;
use cadastre_core::Cidr;

/// The ranges in all writes of routes that may still take effect, by the kind of the object and the node.
#[derive(Clone, Debug, Default)]
pub struct OpenRoutes(BTreeMap<(ObjectKind, NodeName), BTreeSet<Cidr>>);

impl OpenRoutes {
    /// Records that a write of a node's object is sent. An earlier write of the object has a known outcome.
    pub(crate) fn sent(&mut self, kind: ObjectKind, node: &NodeName, ranges: BTreeSet<Cidr>) {
        self.0.insert((kind, node.clone()), ranges);
    }

    /// Records that the outcome of the last write of a node's object is known. Returns the ranges that it wrote.
    pub(crate) fn settled(&mut self, kind: ObjectKind, node: &NodeName) -> BTreeSet<Cidr> {
        self.0.remove(&(kind, node.clone())).unwrap_or_default()
    }

    /// Returns whether an object of the node may list the range as soon as a write takes effect.
    pub(crate) fn may_list(&self, node: &NodeName, range: &Cidr) -> bool {
        let kinds = [ObjectKind::Routes, ObjectKind::FrrConfiguration];
        let mut written = kinds
            .into_iter()
            .filter_map(|kind| self.0.get(&(kind, node.clone())));
        written.any(|it| it.contains(range))
    }
}
