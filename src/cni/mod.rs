//! The CNI protocol and the IPAM plugin.

/// Runs the plugin on the process's environment and standard streams.
pub fn main() -> std::process::ExitCode {
    std::process::ExitCode::FAILURE
}
