//! The network between the machines: a bridge in a network namespace of its own, which also routes between machines.
//!
//! Machine N has the addresses 172.31.0.N and fd00:31::N. The fabric has 172.31.0.254 and fd00:31::254, and the routes
//! that a test sets. Machines can have a second interface, on a second bridge that has no router and no addresses.
//!
//! The API server listens on the host's loopback, which no machine can reach. So a relay listens in
//! the fabric's namespace and forwards connections. This works because a socket stays in the namespace in which it was
//! created, whatever namespace its process is in.

use std::fs::File;
use std::net::{IpAddr, Ipv4Addr, SocketAddr};
use std::path::Path;
use std::sync::mpsc;

use anyhow::{Context as _, Result};
use rustix::thread::{LinkNameSpaceType, move_into_link_name_space};
use std::os::fd::AsFd as _;
use tokio::net::{TcpListener, TcpStream};

use super::holder::Holder;

/// The address at which machines reach the API server.
pub const API: SocketAddr = SocketAddr::new(IpAddr::V4(Ipv4Addr::new(172, 31, 0, 254)), 6443);

/// The address of the Service `kubernetes`. A relay listens on this address, because only a few machines run a
/// kube-proxy, which would forward connections to [`API`].
const SERVICE: SocketAddr = SocketAddr::new(IpAddr::V4(Ipv4Addr::new(10, 96, 0, 1)), 443);

const SETUP: &str = r"
hostname fabric
ip link set lo up
ip link add br0 type bridge
ip address add 172.31.0.254/24 dev br0
ip address add fd00:31::254/64 dev br0 nodad
ip address add 10.96.0.1/32 dev lo
ip link set br0 up
ip link add br1 type bridge
ip link set br1 up
echo 1 > /proc/sys/net/ipv4/ip_forward
echo 1 > /proc/sys/net/ipv6/conf/all/forwarding
";

/// The running network. A machine's interface disappears together with the machine's namespaces.
#[derive(Debug)]
pub struct Fabric {
    holder: Holder,
}

impl Fabric {
    /// Starts the network; `api` is the API server's address on the host.
    pub async fn start(folder: &Path, api: SocketAddr) -> Result<Self> {
        let folder = folder.join("fabric");
        std::fs::create_dir(&folder)?;
        let holder = Holder::start("fabric", SETUP, &folder, &[]).await?;
        relay(holder.network()?, API, api)?;
        relay(holder.network()?, SERVICE, api)?;
        Ok(Self { holder })
    }

    /// Returns the IPv4 and the IPv6 address of machine `number`.
    pub fn addresses(number: u8) -> [String; 2] {
        [format!("172.31.0.{number}"), format!("fd00:31::{number}")]
    }

    /// Connects `machine` to the bridge: creates its `eth0` with its addresses, and default routes via the fabric.
    pub(super) async fn plug(&self, number: u8, machine: &Holder) -> Result<()> {
        self.wire(&port(number), "br0", "eth0", machine).await?;
        let [v4, v6] = Self::addresses(number);
        // The MAC address is the same after each boot, so that the neighbours' ARP and NDP entries for this machine
        // stay valid.
        let script = "set -e
            ip link set lo up
            ip link set eth0 address $2
            ip address add $0/24 dev eth0
            ip address add $1/64 dev eth0 nodad
            ip link set eth0 up
            ip route add default via 172.31.0.254
            ip route add default via fd00:31::254";
        let card = format!("02:00:ac:1f:00:{number:02x}");
        machine.run(&["sh", "-c", script, &v4, &v6, &card]).await?;
        Ok(())
    }

    /// Connects `machine` to the second bridge by its `eth1`, without addresses.
    pub(super) async fn plug_second(&self, number: u8, machine: &Holder) -> Result<()> {
        let port = format!("second{number}");
        self.wire(&port, "br1", "eth1", machine).await?;
        machine.run(&["ip", "link", "set", "eth1", "up"]).await?;
        Ok(())
    }

    /// Connects the interface `name` of `machine` to a bridge, by a port of the bridge.
    async fn wire(&self, port: &str, bridge: &str, name: &str, machine: &Holder) -> Result<()> {
        let pid = machine.pid().to_string();
        // Deletes the interface of an earlier boot, which may still exist for a moment after a power cut.
        let _ = self.run(&["ip", "link", "delete", port]).await;
        self.run(&[
            "ip", "link", "add", port, "type", "veth", "peer", "name", name, "netns", &pid,
        ])
        .await?;
        self.run(&["ip", "link", "set", port, "master", bridge, "up"])
            .await?;
        Ok(())
    }

    /// Routes `cidr` to machine `number`. Replaces an earlier route to `cidr`.
    pub async fn route(&self, cidr: &str, number: u8) -> Result<()> {
        let [v4, v6] = Self::addresses(number);
        let by = if cidr.contains(':') { v6 } else { v4 };
        self.run(&["ip", "route", "replace", cidr, "via", &by])
            .await?;
        Ok(())
    }

    /// Disconnects a machine from the network if `up` is false, and reconnects it if `up` is true.
    pub async fn link(&self, number: u8, up: bool) -> Result<()> {
        let state = if up { "up" } else { "down" };
        self.run(&["ip", "link", "set", &port(number), state])
            .await?;
        Ok(())
    }

    /// The path of the network namespace, for programs that have to run in it.
    pub fn namespace(&self) -> String {
        format!("/proc/{}/ns/net", self.holder.pid())
    }

    /// Runs a program in the network namespace and returns its standard output.
    pub async fn run(&self, args: &[&str]) -> Result<String> {
        self.holder.run_in_network(args).await
    }
}

fn port(number: u8) -> String {
    format!("port{number}")
}

/// Forwards connections from `inside`, an address in the namespace, to `outside`. The relay runs on a thread that lives
/// as long as this process. So the relay outlives the tokio runtime of the test that started it.
fn relay(namespace: File, inside: SocketAddr, outside: SocketAddr) -> Result<()> {
    let (send, listening) = mpsc::channel();
    std::thread::Builder::new()
        .name("relay".to_owned())
        .spawn(move || {
            let listening = listen(&namespace, inside);
            drop(namespace);
            match listening {
                Ok((runtime, listener)) => {
                    let _ = send.send(Ok(()));
                    runtime.block_on(serve(listener, outside));
                }
                Err(error) => {
                    let _ = send.send(Err(error));
                }
            }
        })?;
    listening
        .recv()
        .context("the relay to the API server has ended")?
        .with_context(|| format!("cannot listen on {inside} in the fabric"))
}

/// Creates a listener in another network namespace. The thread is back in its own namespace when this function returns.
fn listen(namespace: &File, address: SocketAddr) -> Result<(tokio::runtime::Runtime, TcpListener)> {
    let own = File::open("/proc/thread-self/ns/net")?;
    let network = Some(LinkNameSpaceType::Network);
    move_into_link_name_space(namespace.as_fd(), network)?;
    let listener = std::net::TcpListener::bind(address);
    move_into_link_name_space(own.as_fd(), network)?;
    let listener = listener?;
    listener.set_nonblocking(true)?;
    let runtime = tokio::runtime::Builder::new_current_thread()
        .enable_io()
        .build()?;
    let entered = runtime.enter();
    let listener = TcpListener::from_std(listener)?;
    drop(entered);
    Ok((runtime, listener))
}

async fn serve(listener: TcpListener, outside: SocketAddr) {
    loop {
        let Ok((mut inner, _)) = listener.accept().await else {
            // The process may be out of file descriptors. Other connections will close, so accepting is retried.
            tokio::task::yield_now().await;
            continue;
        };
        tokio::spawn(async move {
            // While the API server is down, the connection is closed, as it would be without a relay.
            let Ok(mut outer) = TcpStream::connect(outside).await else {
                return;
            };
            let _ = inner.set_nodelay(true);
            let _ = outer.set_nodelay(true);
            let _ = tokio::io::copy_bidirectional(&mut inner, &mut outer).await;
        });
    }
}
