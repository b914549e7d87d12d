"""The types of the generated module, which has none; written by hand."""

import grpc

from bakehouse_router.proto import inference_pb2 as pb

class InferenceStub:
    """A client over a channel of `grpc.aio`; over one of `grpc` the calls are synchronous."""

    def __init__(self, channel: grpc.aio.Channel) -> None: ...
    @property
    def Generate(self) -> grpc.aio.UnaryStreamMultiCallable[pb.GenerateRequest, pb.GenerateReply]: ...
    @property
    def Tokenize(self) -> grpc.aio.UnaryUnaryMultiCallable[pb.TokenizeRequest, pb.TokenizeReply]: ...
    @property
    def Detokenize(self) -> grpc.aio.UnaryUnaryMultiCallable[pb.DetokenizeRequest, pb.DetokenizeReply]: ...
    @property
    def ListModels(self) -> grpc.aio.UnaryUnaryMultiCallable[pb.ListModelsRequest, pb.ListModelsReply]: ...

class InferenceServicer:
    """Refuses every call as unimplemented; a base for others."""

def add_InferenceServicer_to_server(servicer: object, server: grpc.aio.Server) -> None: ...
