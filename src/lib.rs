//! Cadastre: cluster-wide IPAM for Kubernetes.
//!
//! [`ipam`] is the pure core: who holds which range, and what is free. It knows neither the
//! Kubernetes API nor an async runtime nor the clock.

pub mod ipam;
