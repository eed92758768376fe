//! The kubectl plugin `kubectl cadastre`.

use std::process::ExitCode;

#[global_allocator]
static ALLOCATOR: mimalloc::MiMalloc = mimalloc::MiMalloc;

fn main() -> ExitCode {
    cadastre_cli::main(std::env::args_os())
}
