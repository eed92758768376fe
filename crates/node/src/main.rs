//! The executable `cadastre-ipam`: the CNI plugin that the container runtime starts for each call.

use std::process::ExitCode;

fn main() -> ExitCode {
    cadastre_node::cni::main()
}
