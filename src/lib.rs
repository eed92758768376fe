//! Cluster-wide IP address management for Kubernetes.

#[cfg(feature = "controller")]
pub mod api;
#[cfg(feature = "controller")]
pub mod cluster;
#[cfg(feature = "controller")]
pub mod controller;
pub mod ipam;
