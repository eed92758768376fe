//! A control plane of several kube-apiservers and etcd members, as `kubeadm` sets it up with stacked etcd: each API
//! server talks only to the etcd member beside it.
//!
//! Clients reach the API servers through a [`Balancer`] each. Members reach each other through a proxy that can cut off
//! one member from all others.

use std::collections::HashMap;
use std::net::{Ipv4Addr, SocketAddr};
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::time::Duration;

use anyhow::{Context as _, Result};
use kube::Client;
use tokio::io::{AsyncReadExt as _, AsyncWriteExt as _};
use tokio::net::{TcpListener, TcpStream};
use tokio::sync::watch;
use tokio::task::JoinSet;

use crate::apiserver::ApiServer;
use crate::assets;
use crate::balancer::Balancer;
use crate::control_plane::{ADMIN, Options, is_ready, kubectl};
use crate::etcd::{Gateway, Member};
use crate::kubeconfig::{self, User, token_file, write_private};
use crate::pki::{self, Pki};
use crate::scratch::Scratch;
use crate::wait::until;

const LIMIT: Duration = Duration::from_secs(180);

/// A running control plane. On drop, its processes end and its folder is removed.
#[derive(Debug)]
pub struct ReplicatedControlPlane {
    servers: Vec<ApiServer>,
    members: Vec<Member>,
    links: Links,
    options: Options,
    pki: Pki,
    users: Vec<User>,
    scratch: Scratch,
}

impl ReplicatedControlPlane {
    /// Starts `count` members of etcd and as many API servers, and returns when all are ready. The API servers store
    /// all objects as JSON, so that [`Revisions`](crate::Revisions) can read them.
    pub async fn start(count: usize, mut options: Options) -> Result<Self> {
        let _ = rustls::crypto::ring::default_provider().install_default();
        tokio::task::spawn_blocking(|| assets::ensure(&assets::CONTROL_PLANE)).await??;
        let json = "--storage-media-type=application/json";
        options.apiserver_args.push(json.to_owned());
        let scratch = Scratch::new()?;
        let folder = scratch.path();
        let mut users = vec![User::new(ADMIN, &["system:masters"])];
        users.extend(options.users.iter().cloned());
        write_private(&folder.join("tokens.csv"), &token_file(&users))?;
        let member = |i| Member::new(folder, &format!("etcd-{i}"));
        let mut members: Vec<Member> = (0..count).map(member).collect::<Result<_>>()?;
        let links = Links::start(members.iter().map(Member::peer_port)).await?;
        Member::join(&mut members, &links.urls);
        let server = |i| ApiServer::new(&format!("kube-apiserver-{i}"));
        let mut this = Self {
            servers: (0..count).map(server).collect::<Result<_>>()?,
            members,
            links,
            options,
            pki: pki::create(folder)?,
            users,
            scratch,
        };
        for i in 0..count {
            this.start_member(i)?;
        }
        this.links.learn_ids(&this.members).await?;
        for i in 0..count {
            this.start_server(i)?;
        }
        for i in 0..count {
            this.server_ready(i).await?;
        }
        Ok(this)
    }

    /// Returns the folder with data, keys and logs.
    pub fn folder(&self) -> &Path {
        self.scratch.path()
    }

    /// Keeps the folder when this value is dropped, for debugging.
    pub fn keep(&self) {
        self.scratch.keep();
    }

    /// Returns the addresses of all API servers.
    pub fn addresses(&self) -> Vec<SocketAddr> {
        let ports = self.servers.iter().map(ApiServer::port);
        ports.map(|it| (Ipv4Addr::LOCALHOST, it).into()).collect()
    }

    /// Returns an API server, to send signals to its process.
    pub fn server(&self, i: usize) -> Result<&ApiServer> {
        self.servers.get(i).context("no such API server")
    }

    /// Returns a member of etcd.
    pub fn member(&self, i: usize) -> Result<&Member> {
        self.members.get(i).context("no such member")
    }

    /// Returns clients for all members, also for those that do not run.
    pub fn gateways(&self) -> Result<Vec<Gateway>> {
        self.members.iter().map(Member::gateway).collect()
    }

    /// Starts an API server unless it runs. Does not wait until it is ready.
    pub fn start_server(&mut self, i: usize) -> Result<()> {
        let url = self.member(i)?.url();
        let folder = self.scratch.path();
        let server = self.servers.get_mut(i).context("no such API server")?;
        server.start(folder, &[url], &self.pki, &self.options)
    }

    /// Kills an API server.
    pub fn kill_server(&mut self, i: usize) -> Result<()> {
        self.servers
            .get_mut(i)
            .context("no such API server")?
            .kill()
    }

    /// Waits until an API server is ready.
    pub async fn server_ready(&mut self, i: usize) -> Result<()> {
        let client = self.client_of_server(i).await?;
        until(&format!("kube-apiserver-{i} is ready"), LIMIT, async || {
            self.servers[i].check_running()?;
            let ready = tokio::time::timeout(Duration::from_secs(5), is_ready(&client));
            ready.await??;
            Ok(Some(()))
        })
        .await
    }

    /// Starts a member of etcd unless it runs. Does not wait until it is ready.
    pub fn start_member(&mut self, i: usize) -> Result<()> {
        self.members.get_mut(i).context("no such member")?.start()
    }

    /// Kills a member of etcd.
    pub fn kill_member(&mut self, i: usize) -> Result<()> {
        self.members.get_mut(i).context("no such member")?.kill()
    }

    /// Returns the member that leads, according to the members that answer within a second.
    pub async fn leader(&self) -> Result<usize> {
        for member in &self.members {
            let gateway = member.gateway()?;
            let status = tokio::time::timeout(Duration::from_secs(1), gateway.status()).await;
            if let Ok(Ok(status)) = status
                && let Some(i) = self.links.index_of(status.leader)
            {
                return Ok(i);
            }
        }
        anyhow::bail!("no member of etcd knows a leader")
    }

    /// Cuts a member off from the other members, or, with `None`, connects all members again.
    pub fn isolate(&self, member: Option<usize>) {
        self.links.isolated.send_replace(member);
    }

    /// Gives the API servers a new serving certificate of the same CA.
    pub fn renew_certificate(&self) -> Result<()> {
        self.pki.renew_serving()
    }

    /// Returns the credentials of a user.
    pub fn access(&self, user: &str) -> Result<Access> {
        let known = self.users.iter().find(|it| it.name == user);
        let none = || format!("no user {user:?}: add it to Options::users");
        Ok(Access {
            folder: self.folder().to_owned(),
            ca: self.pki.ca.clone(),
            user: known.with_context(none)?.clone(),
        })
    }

    /// Returns a client that authenticates as [`ADMIN`] and reaches the API servers through a balancer.
    pub async fn client(&self, balancer: &Balancer) -> Result<Client> {
        let url = balancer.url();
        kubeconfig::client(self.access(ADMIN)?.kubeconfig(&url)).await
    }

    /// Runs `kubectl apply -f FILE` as [`ADMIN`].
    pub async fn apply(&self, balancer: &Balancer, file: &str) -> Result<()> {
        let kubeconfig = self.access(ADMIN)?.through(balancer)?;
        kubectl(self.folder(), &kubeconfig, &["apply", "-f", file], "").await?;
        Ok(())
    }

    async fn client_of_server(&self, i: usize) -> Result<Client> {
        let url = self.server(i)?.url();
        kubeconfig::client(self.access(ADMIN)?.kubeconfig(&url)).await
    }
}

/// The credentials of a user, from which kubeconfigs are made.
#[derive(Clone, Debug)]
pub struct Access {
    folder: PathBuf,
    ca: PathBuf,
    user: User,
}

impl Access {
    /// Writes a kubeconfig with which the user reaches the API servers through a balancer. Returns its path.
    pub fn through(&self, balancer: &Balancer) -> Result<PathBuf> {
        let name = format!("balanced-{}.kubeconfig", balancer.address().port());
        let path = self.folder.join(name);
        let config = self.kubeconfig(&balancer.url());
        write_private(&path, &format!("{config:#}\n"))?;
        Ok(path)
    }

    fn kubeconfig(&self, server: &str) -> serde_json::Value {
        kubeconfig::kubeconfig(server, &self.ca, &self.user)
    }
}

/// The connections between the members of etcd. Each member is reached through a proxy. The proxy learns from the
/// header `X-Server-From` of the first request on a connection which member has opened the connection.
#[derive(Debug)]
struct Links {
    urls: Vec<String>,
    /// The member that is cut off
    isolated: watch::Sender<Option<usize>>,
    /// Maps the id of each member to its index
    ids: watch::Sender<Arc<HashMap<u64, usize>>>,
    _proxies: JoinSet<()>,
}

impl Links {
    async fn start(ports: impl Iterator<Item = u16>) -> Result<Self> {
        let (isolated, cut) = watch::channel(None);
        let (ids, known) = watch::channel(Arc::default());
        let (mut urls, mut proxies) = (Vec::new(), JoinSet::new());
        for (to, port) in ports.enumerate() {
            let listener = TcpListener::bind((Ipv4Addr::LOCALHOST, 0)).await?;
            urls.push(format!("http://{}", listener.local_addr()?));
            let (cut, known) = (cut.clone(), known.clone());
            proxies.spawn(async move {
                let mut connections = JoinSet::new();
                while let Ok((peer, _)) = listener.accept().await {
                    while connections.try_join_next().is_some() {}
                    let link = Link {
                        to,
                        cut: cut.clone(),
                        known: known.clone(),
                    };
                    // The error is ignored, because the member notices that its connection has failed.
                    connections.spawn(async move { _ = link.serve(peer, port).await });
                }
            });
        }
        Ok(Self {
            urls,
            isolated,
            ids,
            _proxies: proxies,
        })
    }

    /// Waits until all members answer, and learns their ids.
    async fn learn_ids(&self, members: &[Member]) -> Result<()> {
        let mut ids = HashMap::new();
        for (i, member) in members.iter().enumerate() {
            let gateway = member.gateway()?;
            let status = until("etcd is ready", LIMIT, async || {
                let status = gateway.status().await?;
                Ok((status.leader != 0).then_some(status))
            });
            ids.insert(status.await?.member, i);
        }
        self.ids.send_replace(Arc::new(ids));
        Ok(())
    }

    fn index_of(&self, id: u64) -> Option<usize> {
        self.ids.borrow().get(&id).copied()
    }
}

struct Link {
    to: usize,
    cut: watch::Receiver<Option<usize>>,
    known: watch::Receiver<Arc<HashMap<u64, usize>>>,
}

impl Link {
    async fn serve(self, mut peer: TcpStream, port: u16) -> Result<()> {
        let mut first = vec![0; 16 << 10];
        let count = peer.read(&mut first).await?;
        let server = TcpStream::connect((Ipv4Addr::LOCALHOST, port)).await?;
        peer.set_nodelay(true)?;
        server.set_nodelay(true)?;
        let head = String::from_utf8_lossy(&first[..count]).into_owned();
        let (mut from_peer, mut to_peer) = peer.into_split();
        let (mut from_server, mut to_server) = server.into_split();
        let there = async {
            let mut piece = first[..count].to_vec();
            let mut bytes = vec![0; 16 << 10];
            while !piece.is_empty() {
                self.connected(&head).await?;
                to_server.write_all(&piece).await?;
                let count = from_peer.read(&mut bytes).await?;
                piece = bytes[..count].to_vec();
            }
            to_server.shutdown().await?;
            anyhow::Ok(())
        };
        let back = async {
            let mut bytes = vec![0; 16 << 10];
            loop {
                let count = from_server.read(&mut bytes).await?;
                if count == 0 {
                    to_peer.shutdown().await?;
                    return anyhow::Ok(());
                }
                self.connected(&head).await?;
                to_peer.write_all(&bytes[..count]).await?;
            }
        };
        tokio::try_join!(there, back)?;
        Ok(())
    }

    /// Waits until neither end of the connection is cut off. What is sent meanwhile arrives later, as over a network
    /// that repeats lost packets.
    async fn connected(&self, head: &str) -> Result<()> {
        let from = sender(head).and_then(|id| self.known.borrow().get(&id).copied());
        let is_connected =
            |isolated: &Option<usize>| isolated.is_none_or(|it| it != self.to && Some(it) != from);
        self.cut.clone().wait_for(is_connected).await?;
        Ok(())
    }
}

/// Returns the id of the member that has sent a request, according to the head of the request.
fn sender(head: &str) -> Option<u64> {
    let value = head.lines().find_map(|line| {
        let (name, value) = line.split_once(':')?;
        name.eq_ignore_ascii_case("X-Server-From").then_some(value)
    });
    u64::from_str_radix(value?.trim(), 16).ok()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_request_between_members_names_its_sender() {
        let head = "GET /raft/stream/msgappv2/8e9e05c52164694d HTTP/1.1\r\nHost: x\r\nX-Server-From: 91bc3c398fb3c146\r\n\r\n";
        assert_eq!(sender(head), Some(0x91bc_3c39_8fb3_c146));
        assert_eq!(sender("GET /version HTTP/1.1\r\n\r\n"), None);
    }
}
