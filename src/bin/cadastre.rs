//! The `cadastre` command.

use std::process::ExitCode;

use clap::Parser;

#[global_allocator]
static ALLOCATOR: mimalloc::MiMalloc = mimalloc::MiMalloc;

fn main() -> ExitCode {
    if std::env::args_os().nth(1).is_some_and(|it| it == "agent") {
        cadastre::cli::use_small_pages();
    }
    cadastre::cli::main(cadastre::cli::Cli::parse())
}
