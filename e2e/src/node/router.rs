//! A router on the fabric, for programs that exchange routes, such as BIRD.

use std::path::Path;

use anyhow::Result;

use super::available::find;
use super::fabric::Fabric;
use super::guest::Guest;
use super::holder::Holder;

const SETUP: &str = r"
echo 1 > /proc/sys/net/ipv4/ip_forward
echo 1 > /proc/sys/net/ipv6/conf/all/forwarding
";

/// Namespaces with an interface on the fabric, which forward packets. They end when this value is dropped.
#[derive(Debug)]
pub struct Router {
    holder: Holder,
}

impl Router {
    /// Starts a router with the addresses of machine `number`. Its programs log to `folder`.
    pub(super) async fn start(fabric: &Fabric, number: u8, folder: &Path) -> Result<Self> {
        std::fs::create_dir(folder)?;
        let name = format!("r{number}");
        let holder = Holder::start(&name, SETUP, folder, &[]).await?;
        fabric.plug(number, &holder).await?;
        Ok(Self { holder })
    }

    /// Runs a program in the namespaces and returns its standard output.
    pub async fn run(&self, args: &[&str]) -> Result<String> {
        self.holder.run(args).await
    }

    /// Starts a program in the namespaces, which logs to `NAME.log` in the router's folder.
    pub async fn spawn(&self, name: &str, args: &[&str]) -> Result<Guest> {
        self.holder.spawn(name, &[], args).await
    }
}

/// The script that changes the configuration of a running FRR.
const FRR_RELOAD: &str = "/usr/lib/frr/frr-reload.py";

/// Returns an error if one of the routing daemons BIRD and FRR is missing.
pub fn routing_daemons() -> Result<(), String> {
    if find("bird").is_none() {
        return Err("bird is missing: apt-get install bird2".to_owned());
    }
    if find("vtysh").is_none() || !Path::new(FRR_RELOAD).is_file() {
        return Err("FRR is missing: apt-get install frr frr-pythontools".to_owned());
    }
    Ok(())
}
