# The image of the controller and the agent, with the CNI plugin that agents install.
#
#   docker build -t REGISTRY/cadastre:TAG .
#   docker buildx build --platform linux/amd64,linux/arm64 -t REGISTRY/cadastre:TAG --push .
#
# Everything in it is static: it holds two executables and nothing else, no shell and no libraries. An
# architecture is built by a builder of that architecture, or an emulated one.
#
# BUILDER       an image with Rust, where apt-get can bring musl-tools or they are there already. The one here is
#               named by its digest for all architectures, which `docker buildx imagetools inspect` tells of a tag
# BINARIES      `prebuilt` takes target/image as it is (`make image`)
ARG BUILDER=docker.io/library/rust:1.89-bookworm@sha256:948f9b08a66e7fe01b03a98ef1c7568292e07ec2e4fe90d88c07bb14563c84ff
ARG BINARIES=built

FROM ${BUILDER} AS built
ARG TARGETARCH
ARG COMMIT=unknown
WORKDIR /src
COPY . .
# Dependencies stay in the caches, so that a change of the sources builds those alone.
RUN --mount=type=cache,target=/usr/local/cargo/registry \
    --mount=type=cache,target=/src/target,id=cadastre-${TARGETARCH} \
    hack/binaries /out

FROM scratch AS prebuilt
COPY target/image/ /out/

FROM ${BINARIES} AS binaries

FROM scratch
ARG VERSION=0.1.0
ARG COMMIT=unknown
LABEL org.opencontainers.image.title="Cadastre" \
      org.opencontainers.image.description="Cluster-wide IP address management for Kubernetes" \
      org.opencontainers.image.licenses="Apache-2.0" \
      org.opencontainers.image.version="${VERSION}" \
      org.opencontainers.image.revision="${COMMIT}"
COPY --from=binaries /out/ /
# Nobody in particular; the chart makes the agent root, as the folders of a node are root's.
USER 65532:65532
ENTRYPOINT ["/cadastre"]
