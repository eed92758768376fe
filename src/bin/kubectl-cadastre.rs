//! The kubectl plugin `kubectl cadastre`.

use std::process::ExitCode;

#[global_allocator]
static ALLOCATOR: mimalloc::MiMalloc = mimalloc::MiMalloc;

fn main() -> ExitCode {
    cadastre::cli::kubectl::main(std::env::args_os())
}
