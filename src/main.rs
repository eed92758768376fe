//! The executable `cadastre`: parses the command line and runs the subcommand.

use std::process::ExitCode;

use clap::Parser;

#[global_allocator]
static ALLOCATOR: mimalloc::MiMalloc = mimalloc::MiMalloc;

fn main() -> ExitCode {
    cadastre::main(cadastre::Cli::parse())
}
