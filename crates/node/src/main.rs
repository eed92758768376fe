//! The `cadastre-ipam` CNI plugin.

use std::process::ExitCode;

fn main() -> ExitCode {
    cadastre_node::cni::main()
}
